"""Ranges, calls of layers, and the backward pass that runs through them: the code that runs for each range.

Calls of layers are frames of a tree, and the backward pass moves through this tree. Autograd runs the nodes of one
device on one thread, in the reverse order of their creation. So the backward ranges of layers nest on that thread as
their calls did, and a few nodes need to be marked with the call that created them: the node of each output, and each
node where the backward pass returns from a layer to the enclosing code. A prehook on such a node moves the thread's
position in the tree: it closes the ranges of completed layers and opens those of beginning ones. The hooks return
nothing and keep no tensor alive. Module backward hooks are not used, because they wrap inputs and outputs and forbid
in-place operations on views.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any
from weakref import ref

from nvprof_kit._instrument.patches import uncompiled, uncompiled_itself
from nvprof_kit.names import Category, encodable, layer_index, range_text

_LEFT = "nvprof_kit"
"""Metadata key of nodes whose tensor was returned by an outermost call."""

NONE: Mapping[int, Any] = {}

_ACCUMULATE_GRAD = 2**64 - 1
"""Sequence number of nodes that accumulate a leaf's gradient; they belong to no call and run right after the node
before.
"""


class Now:
    """The current backend, and functions about the calling thread.

    Attributes:
        backend: Receives the ranges (`session.Backend`); None for nowhere.
        task: Returns the number of the running backward pass, or -1.
        grad: Returns whether gradients are enabled.
        sequence: Returns the sequence number of the next autograd node.
        begin_task: Enters a backward pass that begins on the calling thread in the thread's `Position`.
        nodes: Returns the nodes that created the tensors in a list: `backward.grad_nodes`, once torch is loaded.
        mark: Makes a node call a frame before it runs: `backward.mark`, likewise.
        tensor: The class of tensors.
    """

    def __init__(self) -> None:
        self.backend: Any = None
        self.task: Callable[[], int] = lambda: -1
        self.grad: Callable[[], bool] = lambda: False
        self.sequence: Callable[[], int] = lambda: 0
        self.begin_task: Callable[[], None]
        self.nodes: Callable[[list[Any]], list[Any]] = lambda _values: []
        self.mark: Callable[[Any, Frame], None]
        self.tensor: type[Any] = Now


now = Now()


class Frame:
    """One call of a layer, while it runs and then for the backward pass; also the prehook of its marked nodes.

    Attributes:
        layer: The layer, or another owner of the call's range.
        backward: The range of the layer's backward pass.
        parent: The enclosing call; None for the root frame.
        depth: The number of enclosing calls.
        edges: Autograd sequence numbers at the call's begin, then at the begin and end of each nested call. Nodes
            numbered from the first, third, … edge on belong to the call, from the second, fourth, … to a nested call.
        arguments: The nodes that created the arguments of the thread's outermost call, by identity, while the call
            runs. They do not belong to the call, whatever their numbers: each thread numbers its nodes from 0, and
            these may be from another thread, for example when an autograd thread recomputes a checkpoint.
        seen: Numbers of the call's own nodes already searched, while the call runs; None before a search.
        marked: Numbers of the marked nodes, likewise.
    """

    __slots__ = ("arguments", "backward", "depth", "edges", "layer", "marked", "parent", "seen")

    def __init__(self, layer: object, backward: Any, parent: Any, sequence: int, arguments: Mapping[int, Any]) -> None:
        self.layer = layer
        self.backward = backward
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.edges = [sequence]
        self.arguments = arguments
        self.seen: set[int] | None = None
        self.marked: set[int] | None = None

    def search(self, node: Any) -> None:
        """Mark the nodes at which a backward pass that arrives at one of the call's own nodes enters these.

        If the call contains nested calls, its own nodes are in sections between them. So the backward pass may enter a
        section at other nodes than the output's; these are found by a search from there.
        """
        edges, arguments = self.edges, self.arguments
        if self.seen is None or self.marked is None:
            self.seen, self.marked = set(), set()
        seen, marked = self.seen, self.marked
        pending = [(node, 0)]
        while pending:
            node, origin = pending.pop()
            number = node._sequence_nr()
            section = bisect_right(edges, number)
            if not section & 1 or number == _ACCUMULATE_GRAD or id(node) in arguments:
                continue
            if section != origin and number not in marked:
                marked.add(number)
                now.mark(node, self)
            if section > 1 and number not in seen:  # no section follows the first one
                seen.add(number)
                pending += [(maker, section) for maker, _ in node.next_functions if maker is not None]

    @uncompiled
    def __call__(self, _grads: object) -> None:
        """Move this thread's backward pass to this call."""
        backend = now.backend
        if backend is None:
            return
        position = backend.thread.position
        if position.number != now.task():
            now.begin_task()
        at, owners, depth = position.at, position.owners, self.depth
        while at is not self and at.depth >= depth:
            if owners and owners[-1] is at:
                owners.pop()
                backend.pop()
            else:
                position.close(at, backend.pop)
            at = at.parent
        position.at = at
        if at is self:
            return
        if self.parent is not at:
            self.parent(None)
        range_ = self.backward
        if range_.backend is not backend:
            backend.prepare(range_)
        range_.push()
        owners.append(self)
        position.at = self


OUTSIDE = Frame(None, None, None, 0, NONE)
"""The root frame, outside all calls."""


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
        task: The running backward pass on the thread, if any (`backward.Task`).
        number: The engine's number of that pass; less than -1 if none.
        at: The call whose nodes are running.
        call: The innermost running call that is followed into the backward pass; `OUTSIDE` if there is none.
    """

    __slots__ = ("at", "call", "number", "owners", "task")

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.task: Any = None
        self.number = -2
        self.at = OUTSIDE
        self.call = OUTSIDE

    def close(self, owner: object, pop: Callable[[], None]) -> None:
        """Close the owner's innermost range and all ranges inside it; does nothing if there is none."""
        owners = self.owners
        index = len(owners) - 1
        while index >= 0 and owners[index] is not owner:
            index -= 1
        while 0 <= index < len(owners):
            owners.pop()
            pop()

    def close_all(self, pop: Callable[[], None]) -> None:
        """Close all ranges."""
        while self.owners:
            self.owners.pop()
            pop()

    @uncompiled
    def begin(self, block: Block, values: list[Any], recomputes: bool) -> Frame:
        """Follow a call with these arguments into the backward pass, from when the block's range is open."""
        outer, nodes, arguments = self.call, now.nodes(values), NONE
        if outer is not OUTSIDE:
            edges, arguments = outer.edges, outer.arguments
            for node in nodes:
                number = node._sequence_nr()
                if number < edges[0] or edges[-1] > number >= edges[-2]:
                    continue  # from before the enclosing call, or of the call before this one
                if bisect_right(edges, number) & 1 and id(node) not in arguments:
                    outer.search(node)
        elif nodes:
            arguments = {id(node): node for node in nodes}
            for node in nodes:  # in a recompute, they belong to the graph that is run backward
                if not recomputes and _LEFT not in node.metadata:
                    now.mark(node, OUTSIDE)
        self.call = Frame(block.owner, block.backward, outer, now.sequence(), arguments)
        return self.call

    @uncompiled
    def end(self, call: Frame, outputs: Any) -> None:
        """End a call: mark the nodes that created its outputs."""
        parent = self.call = call.parent
        edges, arguments = call.edges, call.arguments
        first = edges[0]
        if parent is not OUTSIDE:
            sequence = now.sequence()
            if sequence == first:
                return
            parent.edges += (first, sequence)
        if type(outputs) is now.tensor and not outputs._is_view():  # `Now.nodes` of the usual output
            nodes = [] if outputs.grad_fn is None else [outputs.grad_fn]
        else:
            nodes = now.nodes([outputs])
        for node in nodes:
            number = node._sequence_nr()
            if number < first or (arguments and id(node) in arguments):
                continue
            if parent is OUTSIDE:
                node.metadata[_LEFT] = True
            if edges[-1] == first:
                now.mark(node, call)
            elif bisect_right(edges, number) & 1:
                call.search(node)
        call.seen = call.marked = None
        call.arguments = NONE


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
    position.owners.append(owner)
    call = outputs = None
    try:
        if block.backward is not None and now.grad():
            call = position.begin(block, [*args, *kwargs.values()], recomputes)
        outputs = function(*args, **kwargs)
        return outputs
    finally:
        try:
            if call is not None:
                position.end(call, outputs)
        finally:
            backend = now.backend
            if backend is not None:  # perhaps another one by now
                owners = backend.thread.position.owners
                if owners and owners[-1] is owner:
                    owners.pop()
                    backend.pop()
                else:
                    backend.close(owner)


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
