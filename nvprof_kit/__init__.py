"""Which layer of a transformer costs what, from Nsight's own data.

What a training script imports. A name is loaded when it is first used: importing the package starts nothing and loads
neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvprof_kit.capture.record import RecordOptions as RecordOptions
    from nvprof_kit.capture.record import record as record
    from nvprof_kit.capture.scheduled import scheduled as scheduled
    from nvprof_kit.instrument.flops.count import count_flops as count_flops
    from nvprof_kit.instrument.loop.generation import generation as generation
    from nvprof_kit.instrument.loop.loop import annotate_dataloader as annotate_dataloader
    from nvprof_kit.instrument.loop.loop import annotate_optimizer as annotate_optimizer
    from nvprof_kit.instrument.loop.loop import mark as mark
    from nvprof_kit.instrument.loop.loop import phase as phase
    from nvprof_kit.instrument.loop.loop import step as step
    from nvprof_kit.instrument.loop.schedule import Schedule as Schedule
    from nvprof_kit.instrument.loop.switch import add_profiling_argument as add_profiling_argument
    from nvprof_kit.instrument.loop.switch import profiling_schedule as profiling_schedule
    from nvprof_kit.instrument.memory.points import MemoryOptions as MemoryOptions
    from nvprof_kit.instrument.memory.profiler import MemoryProfiler as MemoryProfiler
    from nvprof_kit.instrument.memory.snapshot import SnapshotOptions as SnapshotOptions
    from nvprof_kit.instrument.memory.snapshot import memory_snapshot as memory_snapshot
    from nvprof_kit.instrument.meters.throughput import Throughput as Throughput
    from nvprof_kit.instrument.meters.timers import global_timer as global_timer
    from nvprof_kit.instrument.meters.utilisation import Utilisation as Utilisation
    from nvprof_kit.instrument.modules.annotate import annotate_model as annotate_model
    from nvprof_kit.instrument.modules.methods import instrument_method as instrument_method
    from nvprof_kit.instrument.ranges.layer_range import layer_range as layer_range
    from nvprof_kit.profiler import handlers as handlers
    from nvprof_kit.profiler.layer_profiler import LayerProfiler as LayerProfiler
    from nvprof_kit.profiler.options import LayerOptions as LayerOptions

__version__ = "0.1.0"

_HOMES = {
    "LayerOptions": ".profiler.options",
    "LayerProfiler": ".profiler.layer_profiler",
    "MemoryOptions": ".instrument.memory.points",
    "MemoryProfiler": ".instrument.memory.profiler",
    "RecordOptions": ".capture.record",
    "Schedule": ".instrument.loop.schedule",
    "SnapshotOptions": ".instrument.memory.snapshot",
    "Throughput": ".instrument.meters.throughput",
    "Utilisation": ".instrument.meters.utilisation",
    "add_profiling_argument": ".instrument.loop.switch",
    "annotate_dataloader": ".instrument.loop.loop",
    "annotate_model": ".instrument.modules.annotate",
    "annotate_optimizer": ".instrument.loop.loop",
    "count_flops": ".instrument.flops.count",
    "generation": ".instrument.loop.generation",
    "global_timer": ".instrument.meters.timers",
    "handlers": ".profiler",
    "instrument_method": ".instrument.modules.methods",
    "layer_range": ".instrument.ranges.layer_range",
    "mark": ".instrument.loop.loop",
    "memory_snapshot": ".instrument.memory.snapshot",
    "phase": ".instrument.loop.loop",
    "profiling_schedule": ".instrument.loop.switch",
    "record": ".capture.record",
    "scheduled": ".capture.scheduled",
    "step": ".instrument.loop.loop",
}

__all__ = [
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
