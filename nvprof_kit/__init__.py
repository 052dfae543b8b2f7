"""Which layer of a transformer costs what, from Nsight's own data.

What a training script imports. A name is loaded when it is first used: importing the package starts nothing and loads
neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture.record import RecordOptions as RecordOptions
    from .capture.record import record as record
    from .capture.scheduled import scheduled as scheduled
    from .instrument.annotate import annotate_model as annotate_model
    from .instrument.flops import count_flops as count_flops
    from .instrument.generation import generation as generation
    from .instrument.layer_range import layer_range as layer_range
    from .instrument.loop import annotate_dataloader as annotate_dataloader
    from .instrument.loop import annotate_optimizer as annotate_optimizer
    from .instrument.loop import mark as mark
    from .instrument.loop import phase as phase
    from .instrument.loop import step as step
    from .instrument.memory import MemoryProfiler as MemoryProfiler
    from .instrument.memory_points import MemoryOptions as MemoryOptions
    from .instrument.methods import instrument_method as instrument_method
    from .instrument.schedule import Schedule as Schedule
    from .instrument.snapshot import SnapshotOptions as SnapshotOptions
    from .instrument.snapshot import memory_snapshot as memory_snapshot
    from .instrument.switch import add_profiling_argument as add_profiling_argument
    from .instrument.switch import profiling_schedule as profiling_schedule
    from .instrument.throughput import Throughput as Throughput
    from .instrument.timers import global_timer as global_timer
    from .instrument.utilisation import Utilisation as Utilisation
    from .job import Job as Job
    from .job import open_job as open_job
    from .profiler import handlers as handlers
    from .profiler.layer_profiler import LayerProfiler as LayerProfiler
    from .profiler.options import LayerOptions as LayerOptions

__version__ = "0.1.0"

_HOMES = {
    "Job": ".job",
    "LayerOptions": ".profiler.options",
    "LayerProfiler": ".profiler.layer_profiler",
    "MemoryOptions": ".instrument.memory_points",
    "MemoryProfiler": ".instrument.memory",
    "RecordOptions": ".capture.record",
    "Schedule": ".instrument.schedule",
    "SnapshotOptions": ".instrument.snapshot",
    "Throughput": ".instrument.throughput",
    "Utilisation": ".instrument.utilisation",
    "add_profiling_argument": ".instrument.switch",
    "annotate_dataloader": ".instrument.loop",
    "annotate_model": ".instrument.annotate",
    "annotate_optimizer": ".instrument.loop",
    "count_flops": ".instrument.flops",
    "generation": ".instrument.generation",
    "global_timer": ".instrument.timers",
    "handlers": ".profiler",
    "instrument_method": ".instrument.methods",
    "layer_range": ".instrument.layer_range",
    "mark": ".instrument.loop",
    "memory_snapshot": ".instrument.snapshot",
    "open_job": ".job",
    "phase": ".instrument.loop",
    "profiling_schedule": ".instrument.switch",
    "record": ".capture.record",
    "scheduled": ".capture.scheduled",
    "step": ".instrument.loop",
}

__all__ = [
    "Job",
    "LayerOptions",
    "LayerProfiler",
    "MemoryOptions",
    "MemoryProfiler",
    "RecordOptions",
    "Schedule",
    "Throughput",
    "Utilisation",
    "add_profiling_argument",
    "annotate_dataloader",
    "annotate_model",
    "annotate_optimizer",
    "count_flops",
    "generation",
    "global_timer",
    "handlers",
    "instrument_method",
    "layer_range",
    "mark",
    "memory_snapshot",
    "phase",
    "profiling_schedule",
    "record",
    "scheduled",
    "step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
