"""What happens before and after each call of a layer; as hooks, before and after a module's forward."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .layer import Layer
from .layer_range import LayerScope
from .uncompiled import uncompiled

_compiling = torch.compiler.is_dynamo_compiling
_nothing = nullcontext().__exit__
"""Takes anything, does nothing, and can be pickled without this package."""


class Calls:
    """The calls of one layer. A copied or pickled module takes hooks along that do nothing.

    Attributes:
        layer: The layer; None of a copy.
        scope: Its ranges; None of a copy.
        entered: Whether it was ever called.
    """

    __slots__ = ("entered", "layer", "scope")

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self.scope = None if layer is None else LayerScope(layer)
        self.entered = False

    def __deepcopy__(self, _memo: dict[int, Any]) -> Calls:
        return Calls(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"enter": _nothing, "leave": _nothing}

    @uncompiled
    def enter(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call on this thread: open its range and, where gradients are wanted, follow it."""
        if _compiling():  # torch.compile traces the hook; it leaves nothing in the graph
            return
        scope = self.scope
        if scope is not None and scope.begin(args, kwargs):
            self.entered = True

    @uncompiled
    def leave(self, _module: Any, _args: Any, outputs: Any) -> None:
        """End this thread's call and whatever was left open in it; ``outputs`` is None where it raised."""
        if _compiling():
            return
        scope = self.scope
        if scope is not None:
            scope.end(outputs)


def hook_module(module: nn.Module, calls: Calls) -> list[Any]:
    """Range a module's calls, its other hooks included; returns the removable handles of the hooks."""
    return [
        module.register_forward_pre_hook(calls.enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(calls.leave, always_call=True),
    ]


def is_ranged(module: nn.Module) -> bool:
    """Whether hooks of ours range the module's calls."""
    return any(isinstance(getattr(hook, "__self__", None), Calls) for hook in module._forward_pre_hooks.values())
