"""Calls of layers as frames of a tree; the backward pass moves through this tree.

Autograd runs the nodes of one device on one thread, in the reverse order of their creation. So the backward ranges of
layers nest on that thread as their calls did, and a few nodes need to be marked with the call that created them: the
node of each output, and each node where the backward pass returns from a layer to the enclosing code. A prehook on such
a node moves the thread's position in the tree: it closes the ranges of completed layers and opens those of beginning
ones. The hooks return nothing and keep no tensor alive. Module backward hooks are not used, because they wrap inputs
and outputs and forbid in-place operations on views.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from nvprof_kit._instrument.compile.uncompiled import uncompiled

_LEFT = "nvprof_kit"
"""Metadata key of nodes whose tensor was returned by an outermost call."""

NONE: Mapping[int, Any] = {}

_ACCUMULATE_GRAD = 2**64 - 1
"""Sequence number of nodes that accumulate a leaf's gradient; they belong to no call and run right after the node
before.
"""


class Now:
    """The current backend, and functions about the calling thread: see `ranges_python`."""

    def __init__(self) -> None:
        self.backend: Any = None
        self.task: Callable[[], int] = lambda: -1
        self.grad: Callable[[], bool] = lambda: False
        self.sequence: Callable[[], int] = lambda: 0
        self.begin_task: Callable[[], None]
        self.grad_nodes: Callable[[list[Any]], list[Any]] | None = None

    def nodes(self, values: list[Any]) -> list[Any]:
        """The autograd nodes that created the tensors in values."""
        return self.grad_nodes(values) if values and self.grad_nodes is not None else []


now = Now()


class Frame:
    """One call of a layer, for the backward pass.

    Attributes:
        layer: The layer, or another owner of the call's range.
        backward: The range of the layer's backward pass.
        parent: The enclosing call; the root frame is its own parent.
        depth: The number of enclosing calls.
        edges: Autograd sequence numbers at the call's begin, then at the begin and end of each nested call. Nodes
            numbered from the first, third, … edge on belong to the call, from the second, fourth, … to a nested call.
        given: The nodes that created the arguments of the thread's outermost call, by identity, while the call runs.
            They do not belong to the call, whatever their numbers: each thread numbers its nodes from 0, and these may
            be from another thread, for example when an autograd thread recomputes a checkpoint.
        seen: Numbers of the call's own nodes already searched, while the call runs.
        marked: Numbers of the marked nodes.
    """

    __slots__ = ("backward", "depth", "edges", "given", "layer", "marked", "parent", "seen")

    def __init__(
        self, layer: object, backward: Any, parent: Frame | None, begin: int, given: Mapping[int, Any] = NONE
    ) -> None:
        self.layer = layer
        self.backward = backward
        self.parent: Frame = parent or self
        self.depth: int = parent.depth + 1 if parent else 0
        self.edges = [begin]
        self.given = given
        self.seen: set[int] = set()
        self.marked: set[int] = set()

    def mark(self, nodes: list[Any], *, ends: bool) -> None:
        """Mark where the backward pass, arriving at these nodes, enters the call's own nodes.

        Marks those of the nodes that belong to the call. If the call contains nested calls, its own nodes are in
        sections between them, and the backward pass may enter a section at other nodes; these are found by a search
        from the call's own nodes.
        """
        for node in nodes:
            if not bisect_right(self.edges, node._sequence_nr()) & 1 or id(node) in self.given:
                continue
            if self is OUTSIDE and _LEFT in node.metadata:
                continue
            if self is OUTSIDE or (ends and len(self.edges) == 1):
                node.register_prehook(self.reach)
            else:
                self._search(node)

    def _search(self, node: Any) -> None:
        pending = [(node, 0)]
        while pending:
            node, origin = pending.pop()
            number = node._sequence_nr()
            section = bisect_right(self.edges, number)
            if not section & 1 or number == _ACCUMULATE_GRAD or id(node) in self.given:
                continue
            if section != origin and number not in self.marked:
                self.marked.add(number)
                node.register_prehook(self.reach)
            if section > 1 and number not in self.seen:  # no section follows the first one
                self.seen.add(number)
                pending += [(maker, section) for maker, _ in node.next_functions if maker is not None]

    def end(self, nodes: list[Any]) -> None:
        """End the call; these nodes created its outputs."""
        self.mark(nodes, ends=True)
        self.seen, self.marked, self.given = set(), set(), NONE
        if self.parent is not OUTSIDE:
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
        _go(backend, position, self)


def _go(backend: Any, position: Any, target: Frame) -> None:
    at = position.at
    while at is not target and at.depth >= target.depth:
        position.close(at, backend.pop)
        position.at = at = at.parent
    if at is not target:
        _go(backend, position, target.parent)
        backend.open(target.backward, target)
        position.at = target


OUTSIDE = Frame(None, None, None, 0)
"""The root frame, outside all calls."""
