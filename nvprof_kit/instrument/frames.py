"""Calls of layers as frames of a tree, and the backward pass as a walk through that tree.

Autograd runs the nodes of one device on one thread, in the reverse order of their creation. So the layers' backward
stretches nest on that thread as their calls did, and it is enough to know at a few nodes which call made them: at the
node of each output, and at each node where the backward pass comes back from a layer into the code around it. A hook
before such a node moves the thread's position in the tree: it closes the ranges of the layers that are done and opens
those that begin. The hooks return nothing and hold no tensor; modules get no backward hooks, which would wrap their
inputs and outputs and forbid in-place operations on views.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any

import torch
from torch.autograd import Variable, _get_sequence_nr

from . import state
from .backends import Range
from .layer import Layer
from .tensors import grad_nodes

_MARK = "nvprof_kit"
"""Key in a node's metadata that says that the node moves the position already."""


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
        seen: Numbers of the call's own nodes that were looked at.
    """

    __slots__ = ("backward", "depth", "edges", "layer", "parent", "seen")

    def __init__(self, layer: Layer, backward: Range, parent: Frame | None, begin: int) -> None:
        self.layer = layer
        self.backward = backward
        self.parent: Frame = parent or self
        self.depth: int = parent.depth + 1 if parent else 0
        self.edges = [begin]
        self.seen: set[int] = set()

    def mark_entries(self, nodes: list[Any]) -> None:
        """Mark where the backward pass, coming to these nodes, enters the call's own ones.

        Those of the nodes that are its own are marked. If the call made calls, its own nodes lie in stretches between
        them, and the backward pass may enter a stretch at other nodes than these; so the own nodes behind them are
        searched for such places.
        """
        edges, seen = self.edges, self.seen
        pending = [(node, 0) for node in nodes]
        while pending:
            node, origin = pending.pop()
            number = node._sequence_nr()
            stretch = bisect_right(edges, number)
            if not stretch & 1:
                continue
            if stretch != origin:
                self._mark(node)
            if len(edges) > 1 and number not in seen:
                seen.add(number)
                pending += [(maker, stretch) for maker, _ in node.next_functions if maker is not None]

    def _mark(self, node: Any) -> None:
        metadata = node.metadata
        if _MARK not in metadata:
            metadata[_MARK] = True
            node.register_prehook(self.reach)

    def reach(self, _grads: Any) -> None:
        """Move this thread's backward pass to this call: the hook before a marked node."""
        backend = state.backend
        if backend is None:
            return
        task = _thread.task
        if task is None or task.number != state.graph_task():
            task = _begin_task()
        at = task.at
        if at is self:
            return
        target: Frame = self
        missing = []
        while at is not target:
            if at.depth >= target.depth:
                backend.close(at.backward)
                at = at.parent
            else:
                missing.append(target.backward)
                target = target.parent
        for range_ in reversed(missing):
            backend.open(range_)
        task.at = self


_NOWHERE = Layer("")
OUTSIDE = Frame(_NOWHERE, _NOWHERE.forward, None, 0)
"""The frame around every call."""


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

    def close(self) -> None:
        """Close its open ranges on this thread."""
        backend, at = state.backend, self.at
        while backend is not None and at is not OUTSIDE:
            backend.close(at.backward)
            at = at.parent


class _End:
    """Called by the engine when a backward pass is done, dropped when it is done or aborted: ends it either way."""

    __slots__ = ("_task",)

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self) -> None:
        self._task.ended = True
        _close_ended()

    __del__ = __call__


class _Thread(threading.local):
    """Where a thread is: in which call, and in which backward pass."""

    frame = OUTSIDE
    task: Task | None = None


_thread = _Thread()


def _close_ended() -> None:
    task = _thread.task
    while task is not None and task.ended:
        task.close()
        task = _thread.task = task.outer


def _begin_task() -> Task:
    """The backward pass that runs on this thread now, from its first marked node on."""
    _close_ended()
    task = _thread.task = Task(state.graph_task(), _thread.task)
    Variable._execution_engine.queue_callback(_End(task))
    return task


def enter(layer: Layer, inputs: Any) -> None:
    """Begin a call of a layer on this thread: open its range and, where gradients are wanted, its frame."""
    backend = state.backend
    if backend is None:
        return
    backend.open(layer.forward if state.graph_task() == -1 else layer.recompute)
    if layer.backward is None or not torch.is_grad_enabled():
        return
    parent = _thread.frame
    nodes = grad_nodes(inputs)
    begin = _get_sequence_nr()
    if parent is not OUTSIDE:
        parent.edges.append(begin)
    if nodes:
        parent.mark_entries(nodes)
    _thread.frame = Frame(layer, layer.backward, parent, begin)


def leave(layer: Layer, outputs: Any) -> None:
    """End this thread's call of a layer and whatever was left open in it; ``outputs`` is None where it raised."""
    frame = _thread.frame
    while frame.layer is not layer and frame is not OUTSIDE:
        frame = frame.parent
    if frame is not OUTSIDE:
        _leave_frame(frame, outputs)
    backend = state.backend
    if backend is not None:
        backend.close(layer.forward if state.graph_task() == -1 else layer.recompute)


def _leave_frame(frame: Frame, outputs: Any) -> None:
    parent = _thread.frame = frame.parent
    nodes = grad_nodes(outputs)
    if nodes:
        frame.mark_entries(nodes)
    frame.edges, frame.seen = [], set()
    if parent is not OUTSIDE:
        parent.edges.append(_get_sequence_nr())
