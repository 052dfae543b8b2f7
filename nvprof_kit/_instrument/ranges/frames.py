"""Backward passes as a thread sees them; `ranges` leads them through the frames, which are the calls of layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

from nvprof_kit._instrument.compile.uncompiled import uncompiled
from nvprof_kit._instrument.modules.tensors import grad_nodes, plain
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.backends import Backend
from nvprof_kit._instrument.ranges.ranges import OUTSIDE, Frame, Here, follow

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs on this thread, -1 where none does."""


class Task:
    """A backward pass (a graph task of the autograd engine) as one thread sees it.

    Attributes:
        outer: The pass inside which it runs on this thread (reentrant checkpointing), if any, with its number and the
            call at which it is.
        ended: Whether the engine is done with it, on whichever thread that was noticed.
    """

    __slots__ = ("ended", "outer")

    def __init__(self, here: Here) -> None:
        self.outer: tuple[Task | None, int, Frame] = here.task, here.number, here.at
        self.ended = False


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
    here: Here = backend.thread.here
    while here.task is not None and here.task.ended:
        while here.at is not OUTSIDE:
            backend.close(here.at)
            here.at = here.at.parent
        here.task, here.number, here.at = here.task.outer


@uncompiled
def begin_task() -> None:
    """A backward pass runs on this thread, and has come to its first marked node."""
    backend = state.backend
    if backend is None:
        return
    _close_ended(backend)
    here: Here = backend.thread.here
    task = Task(here)
    here.task, here.number, here.at = task, graph_task(), OUTSIDE
    Variable._execution_engine.queue_callback(_End(task, backend))


@uncompiled
def begin_following() -> None:
    """Have `ranges` follow calls into their backward passes from now on: before, there was no torch."""
    follow(begin_task, grad_nodes, plain, torch.Tensor, torch.nn.Parameter)
