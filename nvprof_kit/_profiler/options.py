"""What `LayerProfiler` is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._capture.recorder.record import RecordOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvprof_kit._instrument.meters.throughput import Throughput


@dataclass(frozen=True)
class LayerOptions:
    """What to record, and where to write.

    Attributes:
        folder: Holds a folder for each rank, ``rank0_dp0_tp0_pp0``.
        name: What the files' names begin with; the model's class where it is None.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the rank's folder; found by itself
            where the model's parameters have one.
        kinds: Kinds of blocks by a pattern of path or class name, before those told from the model:
            ``{"*.temporal_blocks.*": "temporal"}``. See `nvprof_kit._instrument.modules.kinds.block_kinds`.
        record: What the trace holds besides the defaults.
        memory: Read the CUDA allocator at each begin and end of a layer.
        steps: Range each step; False where the loop does so itself and counts otherwise.
        plots: Draw the curves.
        utilisation: Sample CPU and GPU during each window; needs ``pip install "nvprof-kit[utilisation]"``.
        throughput: A meter of the loop, whose figures go into the log too.
        echo: Rank 0 prints the head of each log.
    """

    folder: str | Path = "traces"
    name: str | None = None
    mesh: Any = None
    kinds: Mapping[str, str] | None = None
    record: RecordOptions = field(default_factory=RecordOptions)
    memory: bool = True
    steps: bool = True
    plots: bool = True
    utilisation: bool = False
    throughput: Throughput[Any] | None = None
    echo: bool = True
