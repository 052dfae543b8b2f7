"""Ranges around blocks of code and around calls: the code that runs for each range."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast
from weakref import ref

from nvprof_kit._instrument.patches import Handle, uncompiled, uncompiled_itself
from nvprof_kit.names import Category, encodable, layer_index, range_text

backend: Any = None
"""Receives the ranges (`session.Backend`); None for nowhere. The functions below are about the calling thread."""

graph_task: Callable[[], int] = partial(int, -1)
"""Returns the number of the running backward pass, or -1."""

grad_enabled: Callable[[], bool] = bool
"""Returns whether gradients are enabled."""

follow = cast(Any, None)
"""Follows a call into the backward pass: `backward.follow`, once torch is loaded."""


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


class Block:
    """A range around a ``with`` block or around calls; reusable and reentrant. It is the owner of its open ranges.

    Attributes:
        range: The range.
        recompute: The range inside a running backward pass; by default the same.
        backward: The range of the backward pass of a call's outputs; None if calls are not followed.
    """

    __slots__ = ("backward", "range", "recompute")

    def __init__(self, range_: Range, recompute: Range | None = None, backward: Range | None = None) -> None:
        self.range = range_
        self.recompute = range_ if recompute is None else recompute
        self.backward = backward

    @uncompiled
    def __enter__(self) -> Block:
        receiver = backend
        if receiver is not None:
            receiver.open(self.range if graph_task() == -1 else self.recompute, self)
        return self

    @uncompiled
    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        receiver = backend
        if receiver is not None:
            receiver.close(self)


@uncompiled_itself
def call_inside(block: Block, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a block, and follow the call into the backward pass.

    In place of the function, a weak reference to a module stands for its ``_call_impl``: `ModuleCall` must not keep the
    module alive.
    """
    if type(function) is ref:
        module: Any = function()
        function = module._call_impl
    receiver = backend
    if receiver is None:
        return function(*args, **kwargs)
    range_ = block.range if graph_task() == -1 else block.recompute
    if range_.backend is not receiver:
        receiver.prepare(range_)
    push, position = range_.push, receiver.thread.position
    push()
    owners = position.owners
    owners.append(block)
    try:
        if block.backward is None or not grad_enabled():
            return function(*args, **kwargs)
        outputs, call = None, follow(position, block, args, kwargs)
        try:
            outputs = function(*args, **kwargs)
            return outputs
        finally:
            call.end(position, outputs)
    finally:
        if backend is receiver and owners and owners[-1] is block:
            owners.pop()
            receiver.pop()
        elif backend is not None:  # another one by now, or ranges that the function left open
            backend.close(block)


class Layer(Block):
    """The ranges of a layer: of a call, of its recompute inside a running backward pass, and of its backward pass.

    Attributes:
        path: The layer's path without wrappers.
        family: The layers of the model by path (`compile.Family`); only set if modules in compiled code are ranged.
    """

    __slots__ = ("family", "path")

    def __init__(self, path: str, category: Category = Category.FORWARD, backward: bool = True) -> None:
        def range_of(category: Category) -> Range:
            return Range(range_text(path, category), category, layer_index(path))

        self.path = path
        self.family: Any = None
        if category is not Category.FORWARD:
            super().__init__(range_of(category))
        else:
            backward_range = range_of(Category.BACKWARD) if backward else None
            super().__init__(range_of(category), range_of(Category.RECOMPUTE), backward_range)

    def swap(self, other: Layer) -> None:
        """Exchange the path and the ranges with another layer, also for calls that are ranged already."""
        for name in ("path", "range", "recompute", "backward"):
            value = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.range.category, self.backward is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


@lru_cache(maxsize=4096)
def layer_of(path: str) -> Layer:
    """The layer with this path; cached, so that its ranges are built once."""
    return Layer(path)


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


def put_around(module: Any, function: Callable[..., Any]) -> Handle:
    """Call a function in place of a module, outside of what is around its calls so far.

    Args:
        module: The module; held weakly.
        function: Gets the function to call in turn, and the call's arguments.
    """
    compiled, functions = ModuleCall.of(module)
    ModuleCall.set(module, compiled, [*functions, function])
    reference = ref(module)

    def remove() -> None:
        owner = reference()
        if owner is not None:
            compiled, functions = ModuleCall.of(owner)
            ModuleCall.set(owner, compiled, [outer for outer in functions if outer is not function])

    return Handle(remove)


def is_ranged(module: Any) -> bool:
    """Whether the module's calls are ranged from outside, by `annotate_model`."""
    return any(map(_is_range, ModuleCall.of(module)[1]))


def _is_range(function: Any) -> bool:
    return getattr(function, "func", None) is call_inside
