"""Ranges around blocks of code and around calls: the code that runs for each range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any
from weakref import ref

from nvprof_kit._instrument.patches import uncompiled, uncompiled_itself
from nvprof_kit.names import Category, encodable, layer_index, range_text


class Now:
    """The current backend, and functions about the calling thread.

    Attributes:
        backend: Receives the ranges (`session.Backend`); None for nowhere.
        task: Returns the number of the running backward pass, or -1.
        grad: Returns whether gradients are enabled.
        begin: Follows a call into the backward pass, from its begin: `backward.begin`, once torch is loaded.
        end: Ends the call: `backward.end`, likewise.
    """

    def __init__(self) -> None:
        self.backend: Any = None
        self.task: Callable[[], int] = lambda: -1
        self.grad: Callable[[], bool] = lambda: False
        self.begin: Callable[[Position, Any, tuple[Any, ...], dict[str, Any], bool], Any]
        self.end: Callable[[Position, Any, Any], None]


now = Now()


class Range:
    """A named range, built once and opened many times.

    Attributes:
        text: The name in the tool: a layer's path (and its phase), a phase, a step; made `names.encodable`.
        category: The NVTX category.
        payload: The layer's index or the step's number; None for others.
        backend: The backend that made `push`.
        push: Opens the range on the calling thread; set by `session.Backend.prepare`.
    """

    __slots__ = ("backend", "category", "payload", "push", "text")

    def __init__(self, text: str, category: Any, payload: int | None = None) -> None:
        self.text = encodable(text) if isinstance(text, str) else text
        self.category = category
        self.payload = payload
        self.backend: Any = None
        self.push: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Range, (self.text, self.category, self.payload)

    def __repr__(self) -> str:
        return f"Range({self.text!r}, {self.category!r})"


class Position:
    """State of a thread.

    Attributes:
        owners: Owners of the thread's open ranges, innermost last.
        call: The innermost running call that is followed into the backward pass (`backward.Frame`); None if none is.
        arguments: The nodes that created the arguments of the outermost of these calls, by identity.
        task: The running backward pass on the thread, if any (`backward.Task`).
        number: The engine's number of that pass; less than -1 if none.
        at: The call whose nodes are running; None outside all calls.
        carrier: A tensor of the thread's own that carries hooks to nodes; None before the first.
    """

    __slots__ = ("arguments", "at", "call", "carrier", "number", "owners", "task")

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.call: Any = None
        self.arguments: dict[int, Any] = {}
        self.task: Any = None
        self.number = -2
        self.at: Any = None
        self.carrier: Any = None

    def close(self, owner: object, pop: Callable[[], None]) -> None:
        """Close the owner's innermost range and all ranges inside it; does nothing if there is none."""
        owners = self.owners
        if owner in owners:
            while owners.pop() is not owner:
                pop()
            pop()

    def close_all(self, pop: Callable[[], None]) -> None:
        """Close all ranges."""
        while self.owners:
            self.owners.pop()
            pop()


class Block:
    """A range around a ``with`` block or around calls; reusable and reentrant.

    Attributes:
        range: The range.
        recompute: The range inside a running backward pass; by default the same.
        backward: The range of the backward pass of a call's outputs; None if calls are not followed.
        owner: Owner of the ranges; by default the block.
    """

    __slots__ = ("backward", "owner", "range", "recompute")

    def __init__(
        self,
        range_: Range,
        recompute: Range | None = None,
        backward: Range | None = None,
        owner: object = None,
    ) -> None:
        self.range = range_
        self.recompute = range_ if recompute is None else recompute
        self.backward = backward
        self.owner = self if owner is None else owner

    @uncompiled
    def __enter__(self) -> Block:
        backend = now.backend
        if backend is not None:
            recomputes = self.recompute is not self.range and now.task() != -1
            backend.open(self.recompute if recomputes else self.range, self.owner)
        return self

    @uncompiled
    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        backend = now.backend
        if backend is not None:
            backend.close(self.owner)


def ranged(function: Callable[..., Any], block: Block) -> Callable[..., Any]:
    """Wrap a function to run inside a block."""
    return partial(call_inside, block, function)


@uncompiled_itself
def call_inside(block: Block, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a block, and follow the call into the backward pass.

    In place of the function, a weak reference to a module stands for its ``_call_impl``: `ModuleCall` must not keep the
    module alive.
    """
    if type(function) is ref:
        module: Any = function()
        function = module._call_impl
    backend = now.backend
    if backend is None:
        return function(*args, **kwargs)
    range_, owner = block.range, block.owner
    recomputes = block.recompute is not range_ and now.task() != -1
    if recomputes:
        range_ = block.recompute
    if range_.backend is not backend:
        backend.prepare(range_)
    range_.push()
    position = backend.thread.position
    owners = position.owners
    owners.append(owner)
    call = outputs = None
    try:
        if block.backward is not None and now.grad():
            call = now.begin(position, owner, args, kwargs, recomputes)
        outputs = function(*args, **kwargs)
        return outputs
    finally:
        try:
            if call is not None:
                now.end(position, call, outputs)
        finally:
            if now.backend is backend and owners and owners[-1] is owner:
                owners.pop()
                backend.pop()
            elif now.backend is not None:  # another one by now, or ranges that the function left open
                now.backend.close(owner)


class Layer:
    """The ranges of a layer.

    Attributes:
        path: The layer's path without wrappers.
        forward: The range of a call.
        recompute: The range of a call inside a running backward pass.
        backward: The range of the backward pass; None if disabled or if the category is not ``forward``.
        family: The layers of the model; only set if modules in compiled code are ranged.
    """

    __slots__ = ("backward", "family", "forward", "path", "recompute")

    def __init__(self, path: str, category: Category = Category.FORWARD, *, backward: bool = True) -> None:
        layered = category is Category.FORWARD
        self.path = path
        self.forward = _range(path, category)
        self.recompute = _range(path, Category.RECOMPUTE) if layered else self.forward
        self.backward = _range(path, Category.BACKWARD) if layered and backward else None
        self.family: Family | None = None

    def block(self) -> Block:
        """The layer's range around calls; inside a backward pass it is a recompute."""
        return Block(self.forward, self.recompute, self.backward, self)

    def __repr__(self) -> str:
        return f"Layer({self.path!r})"


class Family:
    """The layers of one model by path.

    Args:
        layers: The layers.
        root: Name of the model itself, which is not a prefix of the other paths.
    """

    def __init__(self, layers: Mapping[str, Layer], root: str) -> None:
        self._layers = layers
        self._root = root
        self._found: dict[tuple[str, str], tuple[Layer, ...]] = {}

    def below(self, layer: Layer, path: str) -> tuple[Layer, ...]:
        """The layers from a layer (exclusive) down to a path below it, outermost first."""
        requested = layer.path, path
        if requested not in self._found:
            above = [] if layer.path == self._root else layer.path.split(".")
            parts = path.split(".")
            candidates = (".".join(above + parts[: length + 1]) for length in range(len(parts)))
            self._found[requested] = tuple(self._layers[way] for way in candidates if way in self._layers)
        return self._found[requested]


def _range(path: str, category: Category) -> Range:
    return Range(range_text(path, category), category, layer_index(path))


@lru_cache(maxsize=4096)
def layer_of(path: str, category: Category = Category.FORWARD, backward: bool = True) -> Layer:
    """The layer with this path; cached, so that its ranges are built once."""
    return Layer(path, category, backward=backward)


class ModuleCall(partial[Any]):
    """What a module's ``__call__`` runs with our code around it, in place of the module's ``_call_impl``.

    PyTorch has an attribute of modules for such a call: ``nn.Module.compile`` sets it, and copies and pickles of the
    module leave it out. No hook is needed, which would cost the call more than its range.

    Attributes:
        compiled: The compiled call in its place before; None for the module's ``_call_impl``.
        functions: The functions around the call, innermost first; each gets the function to call and its arguments.
    """

    compiled: Callable[..., Any] | None
    functions: list[Callable[..., Any]]

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @classmethod
    def set(cls, module: Any, compiled: Callable[..., Any] | None, functions: list[Callable[..., Any]]) -> None:
        """Set the module's call; without functions around it, what it was before."""
        attributes: Any = vars(module)
        inner: Any = compiled
        if compiled is None:
            inner = ref(module) if functions and _is_range(functions[0]) else partial(_call_module, ref(module))
        for function in functions:
            inner = partial(function, inner)
        if functions:
            call = attributes["_compiled_call_impl"] = cls(inner)
            call.compiled, call.functions = compiled, functions
        elif compiled is not None:
            attributes["_compiled_call_impl"] = compiled
        else:
            attributes.pop("_compiled_call_impl", None)

    @classmethod
    def of(cls, module: Any) -> tuple[Callable[..., Any] | None, list[Callable[..., Any]]]:
        """The compiled call of a module, and the functions around it."""
        call = vars(module).get("_compiled_call_impl")
        return (call.compiled, call.functions) if isinstance(call, cls) else (call, [])


@uncompiled_itself
def _call_module(module: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
    return module()._call_impl(*args, **kwargs)


def is_ranged(module: Any) -> bool:
    """Whether the module's calls are ranged from outside, by `annotate_model`."""
    return any(map(_is_range, ModuleCall.of(module)[1]))


def _is_range(function: Any) -> bool:
    return getattr(function, "func", None) is call_inside
