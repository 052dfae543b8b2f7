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
    """

    def __init__(self) -> None:
        self.backend: Any = None
        self.task: Callable[[], int] = lambda: -1
        self.grad: Callable[[], bool] = lambda: False
        self.sequence: Callable[[], int] = lambda: 0
        self.begin_task: Callable[[], None]
        self.nodes: Callable[[list[Any]], list[Any]] = lambda _values: []


now = Now()


class Frame:
    """One call of a layer, while it runs and then for the backward pass.

    Attributes:
        layer: The layer, or another owner of the call's range.
        backward: The range of the layer's backward pass.
        index: The index of the call's range in `Position.owners`, while the call runs.
        parent: The enclosing call; None until a node has to be marked in the call, and for the root frame.
        depth: The number of enclosing calls, if there is a parent.
        edges: Autograd sequence numbers at the call's begin, then at the begin and end of each nested call. Nodes
            numbered from the first, third, … edge on belong to the call, from the second, fourth, … to a nested call.
        arguments: The nodes that created the arguments of the thread's outermost call, by identity, while the call
            runs. They do not belong to the call, whatever their numbers: each thread numbers its nodes from 0, and
            these may be from another thread, for example when an autograd thread recomputes a checkpoint.
        seen: Numbers of the call's own nodes already searched, while the call runs; None before a search.
        marked: Numbers of the marked nodes, likewise.
    """

    __slots__ = ("arguments", "backward", "depth", "edges", "index", "layer", "marked", "parent", "seen")

    def __init__(self, layer: object, backward: Any, index: int, sequence: int, arguments: Mapping[int, Any]) -> None:
        self.layer = layer
        self.backward = backward
        self.index = index
        self.parent: Any = None
        self.depth = 0
        self.edges = [sequence]
        self.arguments = arguments
        self.seen: set[int] | None = None
        self.marked: set[int] | None = None

    def mark(self, nodes: list[Any], *, ends: bool) -> None:
        """Mark where the backward pass, arriving at these nodes, enters the call's own nodes.

        Marks those of the nodes that belong to the call. If the call contains nested calls, its own nodes are in
        sections between them, and the backward pass may enter a section at other nodes; these are found by a search
        from the call's own nodes.
        """
        edges, arguments = self.edges, self.arguments
        for node in nodes:
            if not bisect_right(edges, node._sequence_nr()) & 1 or id(node) in arguments:
                continue
            if self is OUTSIDE and _LEFT in node.metadata:
                continue
            if self is OUTSIDE or (ends and len(edges) == 1):
                node.register_prehook(self.reach)
            else:
                self._search(node)

    def _search(self, node: Any) -> None:
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
                node.register_prehook(self.reach)
            if section > 1 and number not in seen:  # no section follows the first one
                seen.add(number)
                pending += [(maker, section) for maker, _ in node.next_functions if maker is not None]

    def end(self, nodes: list[Any]) -> None:
        """End the call; these nodes created its outputs."""
        self.mark(nodes, ends=True)
        self.seen = self.marked = None
        self.arguments = NONE
        if self.depth > 1:
            self.parent.edges.append(now.sequence())
        else:
            for node in nodes:
                node.metadata[_LEFT] = True

    @uncompiled
    def reach(self, _grads: object) -> None:
        """Move this thread's backward pass to this call; the prehook of marked nodes."""
        backend = now.backend
        if backend is None:
            return
        position = backend.thread.position
        if position.number != now.task():
            now.begin_task()
        if position.at is not self:
            _go(backend, position, self)


def _go(backend: Any, position: Any, target: Frame) -> None:
    at, owners = position.at, position.owners
    while at is not target and at.depth >= target.depth:
        if owners and owners[-1] is at:
            owners.pop()
            backend.pop()
        else:
            position.close(at, backend.pop)
        position.at = at = at.parent
    if at is not target:
        if target.parent is not at:
            _go(backend, position, target.parent)
        range_ = target.backward
        if range_.backend is not backend:
            backend.prepare(range_)
        range_.push()
        owners.append(target)
        position.at = target


OUTSIDE = Frame(None, None, -1, 0, NONE)
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
        calls: The running calls that are followed into the backward pass, innermost last.
    """

    __slots__ = ("at", "calls", "number", "owners", "task")

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.task: Any = None
        self.number = -2
        self.at = OUTSIDE
        self.calls: list[Frame] = []

    def add(self, owner: object) -> None:
        """Add an open range; its owner, any object, identifies it for `close`."""
        self.owners.append(owner)

    def close(self, owner: object, pop: Callable[[], None]) -> None:
        """Close the owner's innermost range and all ranges inside it; does nothing if there is none."""
        index = self._find(owner)
        if index >= 0:
            self._close_from(index, pop)

    def close_all(self, pop: Callable[[], None]) -> None:
        """Close all ranges."""
        self._close_from(0, pop)

    def _find(self, owner: object) -> int:
        """Index of the owner's innermost range; -1 if there is none."""
        index = len(self.owners) - 1
        while index >= 0 and self.owners[index] is not owner:
            index -= 1
        return index

    def _close_from(self, index: int, pop: Callable[[], None]) -> None:
        while self.calls and self.calls[-1].index >= index:
            self.calls.pop()
        while len(self.owners) > index:
            self.owners.pop()
            pop()

    def begin(self, block: Block, values: list[Any], recomputes: bool) -> None:
        """Follow a call with these arguments, after the block's range was opened."""
        calls, arguments = self.calls, NONE
        nodes = now.nodes(values)
        if nodes and calls:
            outer = calls[-1]
            if outer.parent is None:
                self._link()
            outer.mark(nodes, ends=False)
        elif nodes:
            if not recomputes:  # else they belong to the graph that is run backward
                OUTSIDE.mark(nodes, ends=False)
            arguments = {id(node): node for node in nodes}
        calls.append(Frame(block.owner, block.backward, len(self.owners) - 1, now.sequence(), arguments))

    def end(self, block: Block, outputs: Any) -> None:
        """End the block's call, if it is followed, and calls left open in it."""
        calls, index = self.calls, self._find(block.owner)
        while calls and calls[-1].index > index >= 0:
            calls.pop()
        if not calls or calls[-1].index != index:
            return
        call = calls[-1]
        nodes = None
        if call.parent is None:
            sequence = call.edges[0]
            if len(calls) == 1:  # then looking at the outputs is quicker than asking for the next node's number
                nodes = now.nodes([outputs])
                created = any(node._sequence_nr() >= sequence and id(node) not in call.arguments for node in nodes)
            else:
                created = sequence != now.sequence()
            if not created:
                calls.pop()
                return
            self._link()
        calls.pop()
        call.end(now.nodes([outputs]) if nodes is None else nodes)

    def _link(self) -> None:
        """Give each running call its parent."""
        parent = OUTSIDE
        for call in self.calls:
            if call.parent is None:
                call.parent, call.depth = parent, parent.depth + 1
                if parent is not OUTSIDE:
                    parent.edges.append(call.edges[0])
                    call.arguments = parent.arguments
            parent = call


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
            range_ = self.range
            if self.recompute is not range_ and now.task() != -1:
                range_ = self.recompute
            if range_.backend is not backend:
                backend.prepare(range_)
            range_.push()
            backend.thread.position.owners.append(self.owner)
        return self

    @uncompiled
    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        backend = now.backend
        if backend is not None:
            position = backend.thread.position
            if position.owners and position.owners[-1] is self.owner:
                position.owners.pop()
                backend.pop()
            else:
                position.close(self.owner, backend.pop)

    @uncompiled
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin a call on this thread; returns whether ranges are emitted."""
        backend = now.backend
        if backend is None:
            return False
        range_ = self.range
        recomputes = self.recompute is not range_ and now.task() != -1
        if recomputes:
            range_ = self.recompute
        if range_.backend is not backend:
            backend.prepare(range_)
        range_.push()
        position = backend.thread.position
        position.owners.append(self.owner)
        if self.backward is not None and now.grad():
            try:
                position.begin(self, [*args, *kwargs.values()], recomputes)
            except BaseException:
                self.end(None)
                raise
        return True

    @uncompiled
    def end(self, outputs: Any) -> None:
        """End this thread's call and close ranges left open in it; ``outputs`` is None if the call raised."""
        backend = now.backend
        if backend is None:
            return
        position = backend.thread.position
        try:
            if self.backward is not None and position.calls:
                position.end(self, outputs)
        finally:
            owners = position.owners
            if owners and owners[-1] is self.owner:
                owners.pop()
                backend.pop()
            else:
                position.close(self.owner, backend.pop)


def ranged(function: Callable[..., Any], block: Block) -> Callable[..., Any]:
    """Wrap a function to run inside a block."""
    return partial(call_inside, block, function)


@uncompiled_itself
def call_inside(block: Block, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a block."""
    outputs = None
    begun = block.begin(args, kwargs)
    try:
        outputs = function(*args, **kwargs)
        return outputs
    finally:
        if begun:
            block.end(outputs)


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


class RangesCalls:
    """Base of the objects with hooks that range a module's calls."""

    __slots__ = ()


def is_ranged(module: Any) -> bool:
    """Whether our hooks range the module's calls."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), RangesCalls) for hook in hooks)
