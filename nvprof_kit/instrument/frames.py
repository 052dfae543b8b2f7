"""Calls of layers as frames of a tree, and the backward pass as a walk through that tree.

Autograd runs the nodes of one device on one thread, in the reverse order of their creation. So the layers' backward
stretches nest on that thread as their calls did, and it is enough to know at a few nodes which call made them: at the
node of each output, and at each node where the backward pass comes back from a layer into the code around it. A hook
before such a node moves the thread's position in the tree: it closes the ranges of the layers that are done and opens
those that begin. The hooks return nothing and hold no tensor; modules get no backward hooks, which would wrap their
inputs and outputs and forbid in-place operations on views.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable, _get_sequence_nr

from . import state
from .backends import Backend, Here, Range
from .layer import Layer

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs on this thread, -1 where none does."""

_LEFT = "nvprof_kit"
"""Key in the metadata of a node whose tensor left a call that no other call was around."""


class Frame:
    """One call of a layer, as the backward pass needs it.

    Attributes:
        layer: The layer called.
        backward: The range of the layer's backward pass.
        parent: The call around it; of the frame around every call, itself.
        depth: The number of calls around it.
        edges: Autograd sequence numbers at which control changed hands while the call ran: its begin, then begin and
            end of each call in it. Nodes numbered from an odd edge on are the call's own, from an even one on a call's
            in it.
        searched: Numbers of the call's own nodes that were looked at, and of those that were marked, while it runs.
    """

    __slots__ = ("backward", "depth", "edges", "layer", "parent", "searched")

    def __init__(self, layer: Layer, backward: Range, parent: Frame | None, begin: int) -> None:
        self.layer = layer
        self.backward = backward
        if parent is None:
            self.parent, self.depth = self, 0
        else:
            self.parent, self.depth = parent, parent.depth + 1
        self.edges = [begin]
        self.searched: tuple[set[int], set[int]] | None = None

    def mark_entries(self, nodes: list[Any]) -> None:
        """Mark where the backward pass, coming to these nodes, enters the call's own ones.

        Those of the nodes that are its own are marked. If the call made calls, its own nodes lie in stretches between
        them, and the backward pass may enter a stretch at other nodes than these; so the own nodes behind them are
        searched for such places.
        """
        for node in nodes:
            stretch = bisect_right(self.edges, node._sequence_nr())
            if not stretch & 1 or (self is OUTSIDE and _LEFT in node.metadata):
                continue
            if len(self.edges) == 1:
                node.register_prehook(self.reach)
            else:
                self._search_entries(node)

    def _search_entries(self, node: Any) -> None:
        edges = self.edges
        seen, marked = self.searched = self.searched or (set(), set())
        pending = [(node, 0)]
        while pending:
            node, origin = pending.pop()
            number = node._sequence_nr()
            stretch = bisect_right(edges, number)
            if not stretch & 1:
                continue
            if stretch != origin and number not in marked:
                marked.add(number)
                node.register_prehook(self.reach)
            if number not in seen:
                seen.add(number)
                pending += [(maker, stretch) for maker, _ in node.next_functions if maker is not None]

    def end(self, nodes: list[Any]) -> None:
        """The call ends, and these nodes made what it returns."""
        if nodes:
            self.mark_entries(nodes)
        self.searched = None
        if self.parent is not OUTSIDE:
            self.parent.edges.append(_get_sequence_nr())
        else:
            for node in nodes:
                node.metadata[_LEFT] = True

    def reach(self, _grads: Any) -> None:
        """Move this thread's backward pass to this call: the hook before a marked node."""
        backend = state.backend
        if backend is None:
            return
        task = backend.thread.here.task
        if task is None or task.number != graph_task():
            task = _begin_task(backend)
        at = task.at
        if at is self:
            return
        target: Frame = self
        missing = []
        while at is not target:
            if at.depth >= target.depth:
                backend.close(at)
                at = at.parent
            else:
                missing.append(target)
                target = target.parent
        for frame in reversed(missing):
            backend.open(frame.backward, frame)
        task.at = self


_NOWHERE = Layer("")
OUTSIDE = Frame(_NOWHERE, _NOWHERE.forward, None, 0)
"""The frame around every call."""


def frame_here(here: Here) -> Frame:
    """The call that runs on a thread. One that a forwarder only noted becomes a frame now that it matters."""
    noted = here.frame
    if type(noted) is not tuple:
        return noted or OUTSIDE
    layer, begin, here.frame = noted
    parent = frame_here(here)
    if parent is not OUTSIDE:
        parent.edges.append(begin)
    here.frame = frame = Frame(layer, layer.backward, parent, begin)
    return frame


class Task:
    """A backward pass (a graph task of the autograd engine) as one thread sees it.

    Attributes:
        number: The engine's number of it.
        outer: The pass inside which it runs on this thread (reentrant checkpointing), if any.
        at: The call whose nodes run now.
        ended: Whether the engine is done with it, on whichever thread that was noticed.
    """

    __slots__ = ("at", "ended", "number", "outer")

    def __init__(self, number: int, outer: Task | None) -> None:
        self.number = number
        self.outer = outer
        self.at = OUTSIDE
        self.ended = False

    def close(self, backend: Backend) -> None:
        """Close its open ranges on this thread."""
        while self.at is not OUTSIDE:
            backend.close(self.at)
            self.at = self.at.parent


class _End:
    """Called by the engine when a backward pass is done, dropped when it is done or aborted: ends it either way."""

    __slots__ = ("_backend", "_task")

    def __init__(self, task: Task, backend: Backend) -> None:
        self._task = task
        self._backend = backend

    def __call__(self) -> None:
        self._task.ended = True
        if self._backend is state.backend:
            _close_ended(self._backend)

    __del__ = __call__


def _close_ended(backend: Backend) -> None:
    here = backend.thread.here
    while here.task is not None and here.task.ended:
        here.task.close(backend)
        here.task = here.task.outer


def _begin_task(backend: Backend) -> Task:
    """The backward pass that runs on this thread now, from its first marked node on."""
    _close_ended(backend)
    here = backend.thread.here
    task: Task = Task(graph_task(), here.task)
    here.task = task
    Variable._execution_engine.queue_callback(_End(task, backend))
    return task
