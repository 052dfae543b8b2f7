"""The options of `LayerProfiler`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._capture.recorder.record import RecordOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvprof_kit._instrument.meters.throughput import Throughput


@dataclass(frozen=True)
class LayerOptions:
    """What to record, and where to write; see `LayerProfiler`."""

    folder: Path
    name: str | None
    mesh: Any
    kinds: Mapping[str, str] | None
    record: RecordOptions
    memory: bool
    steps: bool
    plots: bool
    utilisation: bool
    throughput: Throughput[Any] | None
    echo: bool
