"""What the ranges ask PyTorch about the calling thread at each call."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import torch

from nvprof_kit._instrument.ranges import state


def test_pytorch_says_in_c_whether_gradients_are_enabled() -> None:
    enabled = ctypes.CFUNCTYPE(ctypes.c_bool)(state.grad_mode(torch))
    assert enabled()
    with torch.no_grad():
        assert not enabled()


def test_a_pytorch_without_that_function_is_asked_in_python(tmp_path: Path) -> None:
    assert state.grad_mode(SimpleNamespace(__path__=[str(tmp_path)])) == 0
