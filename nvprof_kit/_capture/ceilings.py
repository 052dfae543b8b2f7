"""Two ceilings of this machine's GPU: a large matrix product of each data type, and a large copy, sum or fill.

The fastest of many runs counts, because the ceiling is what the GPU can do, not what it does on average.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nvprof_kit._findings import Finding, checked
from nvprof_kit._instrument.ranks import replacing
from nvprof_kit.errors import ToolError, UsageError
from nvprof_kit.names import PEAKS_FILE

WIDTH = 8192
"""Rows and columns of the matrices."""

COPY_BYTES = 1 << 30
SECONDS = 1.0
"""Time for each measurement."""

_RUNS = 8
"""Runs between two readings of the clock."""


def measure_peaks(folder: str | Path) -> Finding:
    """Measure the GPU, and leave its peaks in a folder, where captures beside them are compared with these.

    Returns:
        What was measured.

    Raises:
        ToolError: PyTorch or a GPU is missing, or the measurement failed.
        UsageError: The folder does not exist or cannot be written to.
    """
    path = Path(folder) / PEAKS_FILE
    if not path.parent.is_dir():
        raise UsageError(f"--measure {folder}: no such folder; needed is that of the captures")
    try:
        import torch
    except ImportError as error:
        raise ToolError(f"--measure needs PyTorch, which cannot be imported here: {error}") from None
    if not torch.cuda.is_available():
        raise ToolError(f"--measure needs a GPU that PyTorch can use; torch {torch.__version__} finds none here")
    try:
        flops, bandwidth = measure("cuda", torch.cuda.get_device_capability())
    except RuntimeError as error:
        raise ToolError(f"--measure failed: {str(error).splitlines()[0]}") from None
    figures = {"gpu": torch.cuda.get_device_name(), "flops": flops, "bandwidth": bandwidth, "torch": torch.__version__}
    try:
        with replacing(path) as new:
            new.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot write it: {error.strerror}") from None
    rates = ", ".join(f"{dtype} {rate / 1e12:,.4g}" for dtype, rate in flops.items())
    text = (
        f"{figures['gpu']}: {rates} TFLOP/s, memory {bandwidth / 1e12:,.3g} TB/s; for captures in the folder of {path}"
    )
    return checked("ok", "peaks", text)


def measure(device: str, capability: tuple[int, int], width: int = WIDTH) -> tuple[Mapping[str, float], float]:
    """Operations per second by data type, and bytes per second.

    Args:
        device: PyTorch's device.
        capability: Its compute capability, which decides about the data types.
        width: Rows and columns of the matrices.
    """
    import torch

    left, right = (torch.randn(width, width, device=device) for _ in range(2))
    operations = 2 * width**3
    flops = {}
    before = torch.get_float32_matmul_precision()
    try:
        for name, precision, since in (("fp32", "highest", (0, 0)), ("tf32", "high", (8, 0))):
            if capability >= since:
                torch.set_float32_matmul_precision(precision)
                flops[name] = operations / _fastest(partial(torch.matmul, left, right), device)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, dtype, since in (("bf16", torch.bfloat16, (8, 0)), ("fp16", torch.float16, (7, 0))):
        if capability >= since:
            flops[name] = operations / _fastest(partial(torch.matmul, left.to(dtype), right.to(dtype)), device)
    if capability >= (8, 9):
        eighths = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        scale = torch.ones((), device=device)
        options = {"scale_a": scale, "scale_b": scale, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        flops["fp8"] = operations / _fastest(partial(torch._scaled_mm, *eighths, **options), device)
    del left, right
    source, addend, target = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(3))
    passes = (2, lambda: target.copy_(source)), (3, lambda: torch.add(source, addend, out=target)), (1, target.zero_)
    return flops, max(arrays * COPY_BYTES / _fastest(run, device) for arrays, run in passes)


def _fastest(run: Callable[[], Any], device: str) -> float:
    """Seconds of the fastest run, of those that fit into a time."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    synchronize()
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end or fastest == float("inf"):
        start = time.perf_counter()
        for _ in range(_RUNS):
            run()
        synchronize()
        fastest = min(fastest, (time.perf_counter() - start) / _RUNS)
    return fastest
