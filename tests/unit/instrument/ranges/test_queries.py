"""What the ranges ask PyTorch about the calling thread at each call."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvprof_kit import layer_range
from nvprof_kit._instrument.ranges import state


def test_pytorch_says_in_c_whether_gradients_are_enabled() -> None:
    enabled = ctypes.CFUNCTYPE(ctypes.c_bool)(state.grad_mode(torch))
    assert enabled()
    with torch.no_grad():
        assert not enabled()


def test_a_pytorch_without_that_function_is_asked_in_python(tmp_path: Path) -> None:
    assert state.grad_mode(SimpleNamespace(__path__=[str(tmp_path)])) == 0


@pytest.mark.parametrize("depth", [1, 70])  # the engine moves to a thread of its own below a depth of 60
def test_a_call_inside_backward_passes_is_a_recompute(depth: int, sink) -> None:
    threads: list[int] = []

    @layer_range("layer")
    def layer(x: torch.Tensor) -> None:
        threads.append(threading.get_ident())

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, left: int) -> torch.Tensor:
            ctx.left = left
            return x.clone()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            layer(grad)
            if ctx.left > 1:
                with torch.enable_grad():
                    Again.apply(torch.ones(1, requires_grad=True), ctx.left - 1).backward()
            return grad, None

    x = torch.ones(1, requires_grad=True)
    layer(x)
    Again.apply(x, depth).backward()
    layer(x)
    assert sink.lines == ["layer", *["layer recompute"] * depth, "layer"]
    assert len(set(threads)) == (1 if depth == 1 else 2)
