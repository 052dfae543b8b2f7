"""Recompute of checkpoints inside a layer's forward.

If a layer's call is checkpointed, the backward pass calls the layer again, and its hooks range the recompute. If a
checkpoint is inside its forward (the blocks of transformers 5, PyTorch's ``CheckpointWrapper``), the backward pass only
runs the checkpointed function again, without the hooks. So that function is ranged here, as recompute of the layer
that called the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Hold, Patch, Patches, Shared
from nvprof_kit._instrument.ranges.layer import Layer, is_ranged
from nvprof_kit._instrument.ranges.ranges import Block, Frame, Position, Range
from nvprof_kit._instrument.torch_compat import skip_compiling, uncompiled, uncompiled_itself
from nvprof_kit.names import Category


def range_recomputes(user: object) -> Hold:
    """Range the recomputes of PyTorch's checkpoints while a user needs it and ranges are emitted.

    Args:
        user: The object that needs it; held weakly.
    """
    return _shared.hold(user)


def _patches() -> list[Patch]:
    frame, function = getattr(checkpoints, "_CheckpointFrame", None), checkpoints.CheckpointFunction
    frames = [] if frame is None else [Patch(frame, "__init__", _kept)]
    return [*frames, Patch(function, "forward", lambda forward: staticmethod(_kept(forward)))]


_checkpoints = Patches(_patches)
_shared = Shared(_checkpoints.install, _checkpoints.undo)


def _kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that saves its second argument for the backward pass, so that it saves the ranged function."""

    @functools.wraps(original)
    def keep(first: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(first, _ranged(function), *args, **kwargs)

    skip_compiling(keep, callees=False)
    return keep


class Recomputes:
    """Ranges checkpoints while ranges are emitted, for layers without `annotate_model`."""

    def __init__(self) -> None:
        self._hold: Hold | None = None

    def start(self) -> None:
        """Start; a second call does nothing."""
        session.annotated[self] = self
        if session.backend is not None:
            self.enable()

    def stop(self) -> None:
        """Stop."""
        session.annotated.pop(self, None)
        self.disable()

    def enable(self) -> None:
        """Range checkpoints, because ranges are now emitted."""
        if self._hold is None and session.mode != "off":
            self._hold = range_recomputes(self)

    def disable(self) -> None:
        """Stop ranging checkpoints, because ranges are no longer emitted."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.remove()


decorated = Recomputes()
"""The instance for decorated functions and blocks of code, which cannot be removed."""


@uncompiled
def _ranged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The checkpointed function, ranged as recompute of the layer that runs on this thread."""
    backend = session.backend
    if backend is None or _ranges_itself(function):
        return function
    recompute = _recompute_at(backend.thread.position)
    return function if recompute is None else functools.partial(_run, recompute, function)


def _recompute_at(position: Position) -> Range | None:
    """The recompute range of the innermost layer in forward or recompute on the thread."""
    for owner in reversed(position.owners):
        if isinstance(owner, Layer):
            return None if owner.recompute is owner.forward else owner.recompute
        if isinstance(owner, Block) and owner.range.category is Category.RECOMPUTE:
            return owner.range
        if isinstance(owner, Frame):  # the backward pass, not inside a recompute
            break
    return None


def _ranges_itself(function: Any) -> bool:
    """Whether the function only calls a module that is already ranged."""
    code = getattr(function, "__code__", None)
    if code is not None and code.co_name == "recompute_fn" and "fn" in code.co_freevars:
        function = function.__closure__[code.co_freevars.index("fn")].cell_contents
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, nn.Module) and getattr(function, "__name__", "") in ("__call__", "_wrapped_call_impl"):
        function = getattr(function, "__self__", None)
    return isinstance(function, nn.Module) and is_ranged(function)


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
