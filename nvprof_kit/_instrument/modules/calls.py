"""Hooks before and after each call of a layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from nvprof_kit._instrument.compile.uncompiled import uncompiled
from nvprof_kit._instrument.modules.classes import RangesCalls
from nvprof_kit._instrument.patches import nothing
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.layer import Layer
from nvprof_kit._instrument.ranges.layer_range import LayerScope

_compiling = torch.compiler.is_dynamo_compiling


class Calls(RangesCalls):
    """The hooks of one layer. In a copied or pickled module they do nothing.

    Attributes:
        layer: The layer; None in a copy.
        scope: The ranges of the layer; None in a copy.
        entered: Whether the layer was ever called.
        running: Approximate number of running calls on all threads; too high after a call that ended without its hook.
    """

    __slots__ = ("entered", "layer", "running", "scope")

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self.scope = None if layer is None else LayerScope(layer)
        self.entered = False
        self.running = 0

    def __deepcopy__(self, _memo: dict[int, Any]) -> Calls:
        return Calls(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"enter": nothing, "leave": nothing}

    @uncompiled
    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Begin a call on this thread: open its range and, if gradients are enabled, follow it into the backward pass.

        Code compiled by torch.compile of PyTorch 2.4 omits ``kwargs``.
        """
        if _compiling():  # torch.compile traces the hook; this adds nothing to the graph
            return
        scope = self.scope
        if scope is None:
            return
        if self.running:
            self._close_interrupted(module)
        if scope.begin(args, kwargs or {}):
            self.entered = True
            self.running += 1

    @uncompiled
    def leave(self, _module: Any, _args: Any, outputs: Any) -> None:
        """End this thread's call and close ranges left open in it; ``outputs`` is None if the call raised."""
        if _compiling():
            return
        scope = self.scope
        if scope is not None:
            self.running -= 1
            scope.end(outputs)

    def _close_interrupted(self, module: Any) -> None:
        """Close ranges of earlier calls on this thread that no longer run.

        PyTorch does not run the hook after an exception that is not an Exception, such as KeyboardInterrupt.
        """
        backend = state.backend
        if backend is None:
            return
        running = _calls_running(module) - 1  # without the call that is beginning
        opened = backend.thread.position.owners.count(self.layer)
        for _ in range(opened - running):
            backend.close(self.layer)
        self.running = min(opened, running)


def _calls_running(module: nn.Module) -> int:
    """Number of running calls of a module on this thread."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


class Place(Protocol):
    """What takes hooks on calls: a module, or what stands for it where it is compiled."""

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call a hook before each call."""

    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = False) -> Any:
        """Call a hook after each call."""


def hook_module(module: Place, calls: Calls) -> Iterator[Any]:
    """Range a module's calls, including its other hooks; yields the handles of the hooks."""
    yield module.register_forward_pre_hook(calls.enter, prepend=True, with_kwargs=True)
    yield module.register_forward_hook(calls.leave, always_call=True)
