"""Backward passes per thread; `ranges` moves each one through the frames, which are calls of layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

from nvprof_kit._instrument.compile.uncompiled import uncompiled
from nvprof_kit._instrument.modules.tensors import grad_nodes
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.backends import Backend
from nvprof_kit._instrument.ranges.ranges import OUTSIDE, Frame, Position, now

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass running on this thread; -1 if none."""


class Task:
    """A backward pass (a graph task of the autograd engine) on one thread.

    Attributes:
        outer: The enclosing pass on this thread (reentrant checkpointing), if any, with its number and its current
            frame.
        ended: Whether the engine has completed the pass; any thread may set it.
    """

    __slots__ = ("ended", "outer")

    def __init__(self, position: Position) -> None:
        self.outer: tuple[Task | None, int, Frame] = position.task, position.number, position.at
        self.ended = False


class _End:
    """Ends a backward pass: the engine calls it at completion, and drops it at completion or abort."""

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
    position: Position = backend.thread.position
    while position.task is not None and position.task.ended:
        while position.at is not OUTSIDE:
            backend.close(position.at)
            position.at = position.at.parent
        position.task, position.number, position.at = position.task.outer


@uncompiled
def begin_task() -> None:
    """Enter a backward pass on this thread, at its first marked node."""
    backend = state.backend
    if backend is None:
        return
    _close_ended(backend)
    position: Position = backend.thread.position
    task = Task(position)
    position.task, position.number, position.at = task, graph_task(), OUTSIDE
    Variable._execution_engine.queue_callback(_End(task, backend))


@uncompiled
def begin_following() -> None:
    """Make `ranges` follow calls into their backward passes, once torch is loaded."""
    now.begin_task, now.grad_nodes = begin_task, grad_nodes
