"""Backward passes per thread, and what activation checkpointing runs again in them.

`ranges` moves each pass through the frames, which are calls of layers. If a layer's call is checkpointed, the backward
pass calls the layer again, and its hooks range the recompute. If a checkpoint is inside its forward (the blocks of
transformers 5, PyTorch's ``CheckpointWrapper``), the backward pass only runs the checkpointed function again, without
the hooks. So that function is ranged here, as recompute of the layer that called the checkpoint.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import methodcaller
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import nn
from torch.autograd import Variable

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import (
    Hold,
    Patch,
    Patches,
    skip_compiling,
    uncompiled,
    uncompiled_itself,
    unseen,
)
from nvprof_kit._instrument.ranges.ranges import OUTSIDE, Block, Frame, Layer, Position, Range, is_ranged, now
from nvprof_kit._instrument.session import Annotation, Backend
from nvprof_kit.names import Category

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


class _Carrier(threading.local):
    def __init__(self) -> None:
        self.tensor = torch.empty(0, device="cpu")


_carrier = _Carrier()


@uncompiled
def mark(node: Any, frame: Frame) -> None:
    """Make a node call the frame before it runs, as ``Tensor.register_hook`` does with a tensor's first hook.

    A tensor carries the hook to the node, which keeps its dictionary. A node's ``register_prehook`` takes twice as
    long: it makes a handle, and passes all gradients.
    """
    carrier: Any = _carrier.tensor
    carrier._backward_hooks = {0: frame}
    node._register_hook_dict(carrier)


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
    now.begin_task, now.nodes, now.mark, now.tensor = begin_task, grad_nodes, mark, torch.Tensor


def _patches() -> list[Patch]:
    frame, function = getattr(checkpoints, "_CheckpointFrame", None), checkpoints.CheckpointFunction
    frames = [] if frame is None else [Patch(frame, "__init__", _kept)]
    return [*frames, Patch(function, "forward", lambda forward: staticmethod(_kept(forward)))]


recomputes = Patches(_patches)
"""Ranges the recomputes of PyTorch's checkpoints while a user needs it and ranges are emitted."""


def _kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that saves its second argument for the backward pass, so that it saves the ranged function."""

    @functools.wraps(original)
    def keep(first: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(first, _ranged(function), *args, **kwargs)

    skip_compiling(keep, callees=False)
    return keep


class Recomputes(Annotation):
    """Ranges checkpoints while ranges are emitted, for an owner of layers without `annotate_model`."""

    def _install(self, _owner: Any) -> list[Hold]:
        return [recomputes.hold(self)]


def range_checkpoints() -> None:
    """Range checkpoints from now on, for decorated functions and blocks of code, which cannot be removed."""
    if range_checkpoints not in session.annotated:
        Recomputes(range_checkpoints)


@uncompiled
def _ranged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The checkpointed function, ranged as recompute of the innermost layer in forward or recompute on this thread."""
    backend = session.backend
    if backend is None:
        return function
    called: Any = function
    code = getattr(called, "__code__", None)
    if code is not None and code.co_name == "recompute_fn" and "fn" in code.co_freevars:
        called = called.__closure__[code.co_freevars.index("fn")].cell_contents
    while isinstance(called, functools.partial):
        called = called.func
    if not isinstance(called, nn.Module) and getattr(called, "__name__", "") in ("__call__", "_wrapped_call_impl"):
        called = getattr(called, "__self__", None)
    if isinstance(called, nn.Module) and is_ranged(called):  # the function only calls a module that ranges itself
        return function
    for owner in reversed(backend.thread.position.owners):
        if isinstance(owner, Layer):
            return function if owner.recompute is owner.forward else functools.partial(_run, owner.recompute, function)
        if isinstance(owner, Block) and owner.range.category is Category.RECOMPUTE:
            return functools.partial(_run, owner.range, function)
        if isinstance(owner, Frame):  # the backward pass, not inside a recompute
            break
    return function


@uncompiled_itself
def _run(recompute: Range, function: Callable[..., Any], /, *args: Any) -> Any:
    """Run the checkpointed function; in a backward pass, as recompute, once for nested checkpoints."""
    backend = session.backend
    if backend is None or torch._C._current_graph_task_id() == -1:
        return function(*args)
    owners = backend.thread.position.owners
    if owners and isinstance(owners[-1], Block) and owners[-1].range is recompute:
        return function(*args)
    with Block(recompute):
        return function(*args)
