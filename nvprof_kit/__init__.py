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
    from .instrument.generation import generation as generation
    from .instrument.layer_range import layer_range as layer_range
    from .instrument.loop import annotate_dataloader as annotate_dataloader
    from .instrument.loop import annotate_optimizer as annotate_optimizer
    from .instrument.loop import mark as mark
    from .instrument.loop import phase as phase
    from .instrument.loop import step as step
    from .instrument.memory import MemoryOptions as MemoryOptions
    from .instrument.memory import MemoryProfiler as MemoryProfiler
    from .instrument.methods import instrument_method as instrument_method
    from .instrument.schedule import Schedule as Schedule
    from .instrument.snapshot import SnapshotOptions as SnapshotOptions
    from .instrument.snapshot import memory_snapshot as memory_snapshot
    from .instrument.timers import global_timer as global_timer

__version__ = "0.1.0"

_HOMES = {
    "MemoryOptions": ".instrument.memory",
    "MemoryProfiler": ".instrument.memory",
    "RecordOptions": ".capture.record",
    "Schedule": ".instrument.schedule",
    "SnapshotOptions": ".instrument.snapshot",
    "annotate_dataloader": ".instrument.loop",
    "annotate_model": ".instrument.annotate",
    "annotate_optimizer": ".instrument.loop",
    "generation": ".instrument.generation",
    "global_timer": ".instrument.timers",
    "instrument_method": ".instrument.methods",
    "layer_range": ".instrument.layer_range",
    "mark": ".instrument.loop",
    "memory_snapshot": ".instrument.snapshot",
    "phase": ".instrument.loop",
    "record": ".capture.record",
    "scheduled": ".capture.scheduled",
    "step": ".instrument.loop",
}

__all__ = [
    "MemoryOptions",
    "MemoryProfiler",
    "RecordOptions",
    "Schedule",
    "annotate_dataloader",
    "annotate_model",
    "annotate_optimizer",
    "generation",
    "global_timer",
    "instrument_method",
    "layer_range",
    "mark",
    "memory_snapshot",
    "phase",
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
