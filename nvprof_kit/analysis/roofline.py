"""The roofline: how many operations a second each kernel does, for how many bytes of DRAM, and what the GPU could do.

The ceilings are of the GPU that was measured, at the clocks it ran at, from the peaks that the report itself holds:
operations a cycle of the CUDA cores and of the tensor cores, bytes a cycle of DRAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.ncu_counters import clock, tensor_bases
from nvprof_kit.analysis.ncu_layers import NcuLayersResult
from nvprof_kit.errors import CaptureError
from nvprof_kit.trace.ncu_schema import NcuReport

if TYPE_CHECKING:
    import pandas as pd

_FMA = {
    "FP32": "sm__sass_thread_inst_executed_op_ffma_pred_on",
    "FP64": "sm__sass_thread_inst_executed_op_dfma_pred_on",
}
_DRAM = "dram__bytes"
_NEEDED = "measure with recipes/ncu/roofline.sh, or with ncu --set roofline"


@dataclass(frozen=True)
class Roofline:
    """A roofline.

    Attributes:
        points: A row per measured kernel: kernel, layer, phase, gpu_ns, intensity in operations a byte, rate in
            operations a second.
        peaks: Operations a second that are possible, by name of what does them.
        bandwidth: Bytes a second that DRAM can move.
        path: The report.
    """

    points: pd.DataFrame
    peaks: dict[str, float]
    bandwidth: float
    path: str


def roofline(report: NcuReport, result: NcuLayersResult) -> Roofline:
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
    shown = (operations > 0) & (amount > 0)
    if not shown.any():
        raise CaptureError(f"{report.path}: no kernel with both operations and bytes of DRAM counted; {_NEEDED}")
    peaks = _peaks(report.metrics)
    bandwidth = _peak(report.metrics, _DRAM)
    if not peaks or not bandwidth:
        raise CaptureError(f"{report.path}: no ceilings in it (metrics *.sum.peak_sustained); {_NEEDED}")
    points = kernels.loc[shown, ["kernel", "layer", "phase", "gpu_ns"]].assign(
        intensity=operations[shown] / amount[shown],
        rate=operations[shown] / kernels["duration_ns"].to_numpy()[shown] * 1e9,
    )
    return Roofline(points.reset_index(drop=True), peaks, bandwidth, report.path)


def _peaks(metrics: pd.DataFrame) -> dict[str, float]:
    """What CUDA cores and tensor cores could do a second, without what the report does not tell."""
    peaks = {name: 2 * _peak(metrics, base) for name, base in _FMA.items()}
    for base in tensor_bases(metrics):
        peaks[f"tensor {base.rpartition('_src_')[2].replace('_dst_', ' to ')}"] = _peak(metrics, base)
    return {name: peak for name, peak in peaks.items() if peak > 0}


def _peak(metrics: pd.DataFrame, base: str) -> float:
    """The largest amount a second: the peak of a cycle by the cycles of a second, the mean over the kernels; 0: not
    told.
    """
    name = f"{base}.sum.peak_sustained"
    if name not in metrics:
        return 0.0
    peak = metrics[name].to_numpy() * clock(metrics, base)
    return 0.0 if np.isnan(peak).all() else float(np.nanmean(peak))
