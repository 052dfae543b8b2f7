"""The calls of layers as frames of a tree, and the backward pass as a walk through that tree.

Autograd runs the nodes of one device on one thread, in the reverse order of their creation. So the layers' backward
stretches nest on that thread as their calls did, and it is enough to know at a few nodes which call made them: at the
node of each output, and at each node where the backward pass comes back from a layer into the code around it. A hook
before such a node moves the thread's position in the tree: it closes the ranges of the layers that are done and opens
those that begin. The hooks return nothing and hold no tensor; modules get no backward hooks, which would wrap their
inputs and outputs and forbid in-place operations on views.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from nvprof_kit._instrument.compile.uncompiled import uncompiled

_LEFT = "nvprof_kit"
"""Key in the metadata of a node whose tensor left a call that no other call was around."""

NONE: Mapping[int, Any] = {}

_GATHERS = 2**64 - 1
"""Number of the nodes that add up a leaf's gradient: of no call, they run right after the node before them."""


class Now:
    """Where ranges go now, and what answers questions about the calling thread: see `ranges_python`."""

    def __init__(self) -> None:
        self.backend: Any = None
        self.task: Callable[[], int] = lambda: -1
        self.grad: Callable[[], bool] = lambda: False
        self.sequence: Callable[[], int] = lambda: 0
        self.begin_task: Callable[[], None]
        self.grad_nodes: Callable[[list[Any]], list[Any]] | None = None

    def nodes(self, values: list[Any]) -> list[Any]:
        """The autograd nodes that made the tensors in values."""
        return self.grad_nodes(values) if values and self.grad_nodes is not None else []


now = Now()


class Frame:
    """One call of a layer, as the backward pass needs it.

    Attributes:
        layer: The layer called, or who else owns the call's range.
        backward: The range of the layer's backward pass.
        parent: The call around it; of the frame around every call, itself.
        depth: The number of calls around it.
        edges: Autograd sequence numbers at which control changed hands while the call ran: its begin, then begin and
            end of each call in it. Nodes numbered from an odd edge on are the call's own, from an even one on a call's
            in it.
        given: By identity the nodes that made what the thread's outermost call was given, while the call runs. They
            are not its own, whatever their numbers: each thread numbers its nodes from zero on, and these may be
            another thread's, above all where autograd's thread runs a checkpoint again.
        seen: Numbers of the call's own nodes that were looked at, while it runs.
        marked: Numbers of those that were marked.
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
        """Mark where the backward pass, coming to these nodes, enters the call's own ones.

        Those of the nodes that are its own are marked. If the call made calls, its own nodes lie in stretches between
        them, and the backward pass may enter a stretch at other nodes than these; so the own nodes behind them are
        searched for such places.
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
            stretch = bisect_right(self.edges, number)
            if not stretch & 1 or number == _GATHERS or id(node) in self.given:
                continue
            if stretch != origin and number not in self.marked:
                self.marked.add(number)
                node.register_prehook(self.reach)
            if stretch > 1 and number not in self.seen:  # behind the first stretch there is no other
                self.seen.add(number)
                pending += [(maker, stretch) for maker, _ in node.next_functions if maker is not None]

    def end(self, nodes: list[Any]) -> None:
        """The call ends, and these nodes made what it returns."""
        self.mark(nodes, ends=True)
        self.seen, self.marked, self.given = set(), set(), NONE
        if self.parent is not OUTSIDE:
            self.parent.edges.append(now.sequence())
        else:
            for node in nodes:
                node.metadata[_LEFT] = True

    @uncompiled
    def reach(self, _grads: object) -> None:
        """Move this thread's backward pass to this call: the hook before a marked node."""
        backend = now.backend
        if backend is None:
            return
        here = backend.thread.here
        if here.number != now.task():
            now.begin_task()
        _go(backend, here, self)


def _go(backend: Any, here: Any, target: Frame) -> None:
    at = here.at
    while at is not target and at.depth >= target.depth:
        here.close(at, backend.pop)
        here.at = at = at.parent
    if at is not target:
        _go(backend, here, target.parent)
        backend.open(target.backward, target)
        here.at = target


OUTSIDE = Frame(None, None, None, 0)
"""The frame around every call."""
