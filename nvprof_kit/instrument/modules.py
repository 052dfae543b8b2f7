"""Forward hooks of a module: they range its calls and lead its backward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from . import frames
from .layer import Layer

_nothing = nullcontext().__exit__
"""Takes anything, does nothing, and can be pickled without this package."""


class _Hook:
    """A hook of one layer. A copied or pickled module takes a hook along that does nothing."""

    __slots__ = ("layer",)

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Enter(_Hook):
    """The hook before a module's forward.

    Attributes:
        layer: The module's layer.
        entered: Whether it was ever called.
    """

    __slots__ = ("entered",)

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.entered = False

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a call, unless torch.compile traces it."""
        if not torch.compiler.is_dynamo_compiling():
            self.entered = True
            frames.enter(self.layer, args, kwargs)


class Leave(_Hook):
    """The hook after a module's forward, also after one that raised."""

    __slots__ = ()

    def __call__(self, _module: nn.Module, _args: Any, outputs: Any) -> None:
        """End a call, unless torch.compile traces it."""
        if not torch.compiler.is_dynamo_compiling():
            frames.leave(self.layer, outputs)


def hook_module(module: nn.Module, enter: Enter) -> list[Any]:
    """Range a module's calls, its other hooks included; returns the removable handles of the hooks."""
    return [
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(Leave(enter.layer), always_call=True),
    ]


def is_ranged(module: nn.Module) -> bool:
    """Whether hooks of ours range the module's calls."""
    return any(type(hook) is Enter for hook in module._forward_pre_hooks.values())
