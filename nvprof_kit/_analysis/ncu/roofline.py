"""The roofline: operations per second and per byte of DRAM of each kernel, and the limits of the GPU.

The ceilings are those of the measured GPU at the clocks it ran at, from the peaks in the report itself: operations per
cycle of the CUDA cores and of the tensor cores, bytes per cycle of DRAM. Since Ampere the reported peak of a number
type on tensor cores includes 2:4 sparsity, twice the dense one (seen on an H200); reports split it by sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.ncu.counters import clock, tensor_bases
from nvprof_kit._analysis.ncu.layers import NcuLayers
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    import pandas as pd

_FFMA = "sm__sass_thread_inst_executed_op_ffma_pred_on"
_DFMA = "sm__sass_thread_inst_executed_op_dfma_pred_on"
_DRAM = "dram__bytes"
_NEEDED = "measure with nvprof-kit ncu profile --set roofline, or with ncu --set roofline"


@dataclass(frozen=True)
class Roofline:
    """A roofline.

    Attributes:
        points: A row per measured kernel: kernel, layer, phase, gpu_ns, intensity in operations a byte, rate in
            operations a second.
        peaks: Operations a second that are possible, by name of what does them: FP32, FP64 where it was used, and of
            the tensor cores' types those that were used, else all. Without sparsity where the report tells it apart;
            with it one more where it was used.
        bandwidth: Bytes a second that DRAM can move.
        path: The report.
    """

    points: pd.DataFrame
    peaks: dict[str, float]
    bandwidth: float
    path: str


def roofline(report: NcuReport, result: NcuLayers) -> Roofline:
    """The roofline of a report.

    Args:
        report: What ncu measured.
        result: Its hardware table.

    Raises:
        CaptureError: The report lacks operations, bytes of DRAM, or the peaks.
    """
    kernels = result.kernels
    operations = np.nansum(kernels[["flop", "tensor_flop"]].to_numpy(), axis=1)
    amount = kernels["dram_bytes"].to_numpy()
    is_shown = (operations > 0) & (amount > 0)
    if not is_shown.any():
        raise CaptureError(f"{report.path}: no kernel with both operations and bytes of DRAM counted; {_NEEDED}")
    peaks = _peaks(report.metrics)
    bandwidth = _peak(report.metrics, _DRAM)
    if not peaks or not bandwidth:
        raise CaptureError(f"{report.path}: no ceilings in it (metrics *.sum.peak_sustained); {_NEEDED}")
    points = kernels.loc[is_shown, ["kernel", "layer", "phase", "gpu_ns"]].assign(
        intensity=operations[is_shown] / amount[is_shown],
        rate=operations[is_shown] / kernels["duration_ns"].to_numpy()[is_shown] * 1e9,
    )
    return Roofline(points.reset_index(drop=True), peaks, bandwidth, report.path)


def _peaks(metrics: pd.DataFrame) -> dict[str, float]:
    """Peak operations per second of the CUDA cores and the tensor cores, without those the report lacks."""
    bases = tensor_bases(metrics)
    used = [base for base in bases if _counted(metrics, base)]
    peaks = {"FP32": 2 * _peak(metrics, _FFMA)}
    if any(_counted(metrics, f"smsp__sass_thread_inst_executed_op_{op}_pred_on") for op in ("dadd", "dmul", "dfma")):
        peaks["FP64"] = 2 * _peak(metrics, _DFMA)
    counters = {str(name).split(".")[0] for name in metrics}
    for base in used or bases:
        name = f"tensor {_number(base).replace('_dst_', ' to ')}"
        pattern = rf"sm__ops_path_tensor_(op_[a-z0-9]+_)?src_{_number(base)}(_dst_[a-z0-9]+)?_sparsity_"  # of any pipe
        dense, sparse = (
            sorted({counter for counter in counters if re.fullmatch(pattern + state, counter)})
            for state in ("off", "on")
        )
        peaks[name] = max((_peak(metrics, split) for split in dense), default=0.0) or _peak(metrics, base)
        if any(_counted(metrics, split) for split in sparse):
            peaks[f"{name}, sparse"] = max(_peak(metrics, split) for split in sparse) or _peak(metrics, base)
    return {name: peak for name, peak in peaks.items() if peak > 0}


def _number(base: str) -> str:
    """The number types of a tensor counter, ``bf16_dst_fp32``."""
    return base.rpartition("_src_")[2]


def _counted(metrics: pd.DataFrame, base: str) -> bool:
    """Whether this counter is above 0 for any kernel."""
    names = (f"{base}.sum", f"{base}.sum.per_second", f"{base}.sum.per_cycle_elapsed")
    return any(name in metrics and bool((metrics[name] > 0).any()) for name in names)


def _peak(metrics: pd.DataFrame, base: str) -> float:
    """The peak per second: peak per cycle times cycles per second, the mean over the kernels; 0 if not reported."""
    name = f"{base}.sum.peak_sustained"
    if name not in metrics:
        return 0.0
    peak = metrics[name].to_numpy() * clock(metrics, base)
    return 0.0 if np.isnan(peak).all() else float(np.nanmean(peak))
