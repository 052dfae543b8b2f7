"""Backward passes per thread: `ranges` moves each one through the frames, which are calls of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import methodcaller
from typing import Any

import torch
from torch.autograd import Variable

from nvprof_kit._instrument import session
from nvprof_kit._instrument.ranges.backends import Backend
from nvprof_kit._instrument.ranges.ranges import OUTSIDE, Frame, Position, now
from nvprof_kit._instrument.torch_compat import uncompiled, unseen

plain: set[type] = {type(None), bool, int, float, str}
"""Types known to hold no tensors; grows as others are found."""

_MOST = 10_000
"""Maximum number of values to search; also ends the search of a structure that contains itself."""

_Parts = Callable[[Any], Iterable[Any]]


@uncompiled
def grad_nodes(values: list[Any]) -> list[Any]:
    """The autograd nodes that created the tensors in values, in nested lists, tuples, mappings and dataclasses.

    For a view, this includes the node of its base: an in-place operation on the view later replaces the view's own
    node.

    Args:
        values: The values to search; the list is modified.
    """
    nodes = []
    for value in values:  # the list grows during the loop
        kind = type(value)
        try:
            parts_of = _kinds[kind]
        except KeyError:
            parts_of = _learn(kind)
        if parts_of is _of_tensor:
            node = value.grad_fn
            if node is not None:
                nodes.append(node)
                if value._is_view() and (base_node := value._base.grad_fn) is not None:
                    nodes.append(base_node)
        elif parts_of is not None and len(values) < _MOST:
            values += parts_of(value)
    return nodes


def _of_tensor(_tensor: Any) -> tuple[Any, ...]:
    return ()


@unseen
def _learn(kind: type) -> _Parts | None:
    """A function that returns the parts of a value of this type; None if no tensors can be found in it."""
    parts_of: _Parts | None = None
    if issubclass(kind, torch.Tensor):
        parts_of = _of_tensor
    elif issubclass(kind, (list, tuple)):
        parts_of = iter
    elif issubclass(kind, Mapping):
        parts_of = methodcaller("values")
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        parts_of = lambda record: [getattr(record, name, None) for name in names]  # noqa: E731
    else:
        plain.add(kind)
    _kinds[kind] = parts_of
    return parts_of


_kinds: dict[type, _Parts | None] = {}


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
        if self._backend is session.backend:
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
    backend = session.backend
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
    now.begin_task, now.nodes = begin_task, grad_nodes
