"""What happens before and after each call of a layer; as hooks, before and after a module's forward."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr

from . import state
from .backends import Here
from .frames import OUTSIDE, Frame, frame_here, graph_task
from .layer import Layer
from .tensors import grad_nodes

_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_nothing = nullcontext().__exit__
"""Takes anything, does nothing, and can be pickled without this package."""


class Calls:
    """The calls of one layer. A copied or pickled module takes hooks along that do nothing.

    Attributes:
        layer: The layer; None of a copy.
        entered: Whether it was ever called.
    """

    __slots__ = ("entered", "layer")

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self.entered = False

    def __deepcopy__(self, _memo: dict[int, Any]) -> Calls:
        return Calls(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"enter": _nothing, "leave": _nothing}

    def enter(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call on this thread: open its range and, where gradients are wanted, its frame."""
        if _compiling():  # torch.compile traces the hook; it leaves nothing in the graph
            return
        backend, layer = state.backend, self.layer
        if backend is None or layer is None:
            return
        self.entered = True
        recomputes = graph_task() != -1
        range_ = layer.recompute if recomputes else layer.forward
        if range_.backend is not backend:
            backend.prepare(range_)
        range_.push()
        here: Here = backend.thread.here
        here.owners.append(layer)
        if _grad_enabled() and layer.backward is not None:
            parent = frame_here(here)
            nodes = grad_nodes([*args, *kwargs.values()] if kwargs else [*args])
            begin = _get_sequence_nr()
            if parent is not OUTSIDE:
                parent.edges.append(begin)
            if nodes and not (recomputes and parent is OUTSIDE):  # else they are of the graph that is run backward
                parent.mark_entries(nodes)
            here.frame = Frame(layer, layer.backward, parent, begin)

    def leave(self, _module: Any, _args: Any, outputs: Any) -> None:
        """End this thread's call and whatever was left open in it; ``outputs`` is None where it raised."""
        if _compiling():
            return
        backend, layer = state.backend, self.layer
        if backend is None or layer is None:
            return
        here: Here = backend.thread.here
        if here.frame is not None:
            frame = frame_here(here)
            while frame.layer is not layer and frame is not OUTSIDE:
                frame = frame.parent
            if frame is not OUTSIDE:
                here.frame = None if frame.parent is OUTSIDE else frame.parent
                frame.end(grad_nodes([outputs]))
        owners = here.owners
        if owners and owners[-1] is layer:  # `Backend.close`, of which this is the usual case
            owners.pop()
            backend.pop()
        else:
            backend.close(layer)


def hook_module(module: nn.Module, calls: Calls) -> list[Any]:
    """Range a module's calls, its other hooks included; returns the removable handles of the hooks."""
    return [
        module.register_forward_pre_hook(calls.enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(calls.leave, always_call=True),
    ]


def is_ranged(module: nn.Module) -> bool:
    """Whether hooks of ours range the module's calls."""
    return any(isinstance(getattr(hook, "__self__", None), Calls) for hook in module._forward_pre_hooks.values())
