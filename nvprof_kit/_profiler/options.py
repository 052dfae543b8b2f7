"""The options of `LayerProfiler`."""

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
    """Options of `LayerProfiler`: what to record, and where to write.

    Attributes:
        folder: Output folder; each rank writes to its own subfolder, ``rank0_dp0_tp0_pp0``.
        name: Prefix of the file names; None for the model's class.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the subfolder. By default that of the
            model's parameters, if they have one.
        kinds: Kind of block by a glob pattern of its path or class name; overrides the detected kinds:
            ``{"*.temporal_blocks.*": "temporal"}``.
        record: What to record besides the defaults.
        memory: Read the CUDA allocator's counters at the begin and end of each layer.
        steps: Range each step; set False if the loop ranges its steps itself.
        plots: Write the plots.
        utilisation: Sample CPU and GPU during each window; needs ``pip install "nvprof-kit[utilisation]"``.
        throughput: A meter of the loop; its figures are added to the log.
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
