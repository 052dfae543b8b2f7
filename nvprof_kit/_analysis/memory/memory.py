"""Who held the GPU's memory: at the peak, from step to step, and at the end.

The level of allocated memory is the running sum of allocations minus frees, anchored at the end of the snapshot, where
the segments show what is held. Each block held at the peak is listed by the layer, phase and stack that allocated it;
memory from before the history has a row of its own, so the rows add up to the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.layers.fold import Views
from nvprof_kit._analysis.memory.labels import holder_table, read_labels, size_class, stack_texts
from nvprof_kit._analysis.memory.steps import COLUMNS, segment_table, step_table, traffic_table
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, plural
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._trace.torch_memory.snapshot import Snapshot


_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

_LEAK_STEPS = 3


@dataclass(frozen=True)
class MemorySummary:
    """Key figures of a device's memory.

    Attributes:
        device: Device ordinal.
        peak_bytes: Maximum of the allocated bytes in the history, as requested, before rounding.
        peak_event: Index of the event that reached the peak, among the device's events; -1 without a history.
        reserved_bytes: Bytes reserved from CUDA when the snapshot was taken.
        allocated_bytes: Bytes allocated at that time, as rounded by the allocator.
        events: Number of events in the history.
        labelled: Fraction of the peak's bytes in a named layer, 0 to 1.
        ooms: Sizes of failed allocations, in bytes.
    """

    device: int
    peak_bytes: int
    peak_event: int
    reserved_bytes: int
    allocated_bytes: int
    events: int
    labelled: float
    ooms: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False, eq=False)
class Memory(Views):
    """Which layers held GPU memory at the peak, how memory grew between steps, leaks, and fragmentation.

    `columns` has those of its tables.

    Attributes:
        path: The snapshot's file.
        summary: Key figures of the device.
        layer: Memory held at the peak by layer and phase.
        stack: The same by the call stack of the allocation.
        size: The same by size class.
        allocation: Allocations of each layer over the whole history.
        step: Growth from step to step; empty if no allocation is labelled with a step.
        segment: Fragmentation.
        leak: Allocations that step after step did not free.
        level_bytes: Allocated bytes after each event, shape ``(events,)``.
        reserved_bytes: Reserved bytes after each event, shape ``(events,)``.
        held: The blocks of the history: columns start, end (event numbers), size_bytes, layer, phase.
        snapshot: The snapshot.
        warnings: What may be missing.
    """

    path: str
    summary: MemorySummary
    layer: pd.DataFrame
    stack: pd.DataFrame
    size: pd.DataFrame
    allocation: pd.DataFrame
    step: pd.DataFrame
    segment: pd.DataFrame
    leak: pd.DataFrame
    level_bytes: Int64Array
    reserved_bytes: Int64Array
    held: pd.DataFrame
    snapshot: Snapshot
    warnings: tuple[Issue, ...] = ()

    columns: ClassVar = {f"memory-{view}": columns for view, columns in COLUMNS.items()}
    ranked: ClassVar = {
        "layer": ("bytes", ("bytes", "largest_bytes")),
        "allocation": ("allocated_bytes", ("allocated_bytes", "peak_bytes")),
    }


def memory(snapshot: Snapshot, device: int | None = None) -> Memory:
    """Who held a device's memory.

    Args:
        snapshot: The snapshot.
        device: The device; None for the one with the most reserved memory.

    Raises:
        CaptureError: The snapshot has nothing of this device, or nothing at all.
    """
    device = _device(snapshot, device)
    events = snapshot.events[snapshot.events["device"] == device]
    segments = segment_table(snapshot.segments, snapshot.blocks, device)
    freed = "free_requested" if "free_requested" in events["action"].cat.categories else "free_completed"
    blocks, on_device = snapshot.blocks, (snapshot.segments["device"] == device).to_numpy()
    is_held = on_device[blocks["segment"].to_numpy()] & (blocks["state"] == "active_allocated")
    level = _level(events, {"alloc": 1, freed: -1}, int(blocks["requested_bytes"][is_held].sum()))
    labels = read_labels(events["label"].cat.categories)
    allocations = _lifetimes(events, freed).join(labels, on="label")
    allocated, reserved = (int(segments[name].sum()) for name in ("allocated_bytes", "total_bytes"))
    peak, peak_bytes = (int(level.argmax()), int(level.max())) if len(level) else (-1, allocated)
    at_peak = allocations[(allocations["start"] <= peak) & (allocations["end"] > peak)]
    in_layers = int(at_peak["size_bytes"][at_peak["layer"] != NO_LAYER].sum())
    summary = MemorySummary(
        device,
        peak_bytes,
        peak,
        reserved,
        allocated,
        events=len(events),
        labelled=in_layers / max(peak_bytes, 1),
        ooms=tuple(map(int, events["size_bytes"][events["action"] == "oom"])),
    )
    left = allocations[(allocations["end"] == len(events)) & allocations["step"].notna()]
    left = left.assign(stack=stack_texts(snapshot.stacks, events["stack"].iloc[left["start"]]))
    places = left.groupby(["layer", "phase", "stack"], observed=True, sort=False)
    leaks = places.agg(steps=("step", "nunique"), blocks=("step", "size"), bytes=("size_bytes", "sum")).reset_index()
    leaks = leaks[leaks["steps"] >= _LEAK_STEPS]
    leaks["bytes_per_step"] = (leaks["bytes"] // leaks["steps"].clip(lower=1)).astype("int64")
    leaks = leaks.sort_values("bytes", ascending=False, kind="stable", ignore_index=True)
    before = peak_bytes - int(at_peak["size_bytes"].sum())
    stacks = stack_texts(snapshot.stacks, events["stack"].iloc[at_peak["start"]])
    return Memory(
        snapshot.path,
        summary,
        layer=holder_table(at_peak, {"layer": at_peak["layer"], "phase": at_peak["phase"]}, before),
        stack=holder_table(at_peak, {"stack": stacks}, before),
        size=holder_table(at_peak, {"size": size_class(at_peak["size_bytes"])}, before),
        allocation=traffic_table(allocations, len(events)),
        step=step_table(allocations, level, labels["step"].iloc[events["label"].cat.codes]),
        segment=segments,
        leak=leaks[list(COLUMNS["leak"])],
        level_bytes=level,
        reserved_bytes=_level(events, _RESERVING, reserved),
        held=allocations,
        snapshot=snapshot,
        warnings=tuple(_warnings(summary, before, allocations)),
    )


def _device(snapshot: Snapshot, device: int | None) -> int:
    reserved = snapshot.segments.groupby("device")["total_bytes"].sum()
    devices = sorted({*reserved.index.tolist(), *snapshot.events["device"].unique().tolist()})
    if not devices:
        raise CaptureError(f"{snapshot.path}: an empty snapshot: nothing was allocated and there is no history")
    if device is None:
        return int(reserved.index.to_numpy()[reserved.argmax()]) if len(reserved) else int(devices[0])
    if device not in devices:
        raise CaptureError.of("no-device", path=snapshot.path, device=device, devices=", ".join(map(str, devices)))
    return device


def _level(events: pd.DataFrame, signs: dict[str, int], at_end: int) -> Int64Array:
    """Running sum of sizes by signed actions, shifted to end at a known level."""
    by_code = np.array([signs.get(name, 0) for name in events["action"].cat.categories], dtype=np.int64)
    change = by_code[events["action"].cat.codes.to_numpy()] * events["size_bytes"].to_numpy()
    level = np.cumsum(change)
    return level + (at_end - level[-1]) if len(level) else level


def _lifetimes(events: pd.DataFrame, freed: str) -> pd.DataFrame:
    """Each block that was allocated in the history: event numbers at which it was allocated and freed (else their
    count), size_bytes, and the code of its label.
    """
    is_alloc, is_free = ((events["action"] == name).to_numpy() for name in ("alloc", freed))
    rows = np.flatnonzero(is_alloc | is_free)
    address = events["addr"].to_numpy()[rows]
    order = np.argsort(address, kind="stable")
    event, address = rows[order], address[order]
    is_start, follows = is_alloc[event], np.append(event, len(events))[1:]
    is_freed = np.append(address[1:] == address[:-1], False)[: len(event)] & ~np.append(is_start, True)[1:]
    start = event[is_start]
    end, label = np.where(is_freed, follows, len(events))[is_start], events["label"].cat.codes.to_numpy()[start]
    blocks = events[["size_bytes"]].iloc[start].assign(start=start, end=end, label=label)
    return blocks.astype("int64").reset_index(drop=True)


def _warnings(summary: MemorySummary, before: int, allocations: pd.DataFrame) -> list[Issue]:
    issues = []
    if summary.peak_event < 0:
        issues.append(Issue.of("no-history"))
    elif before > 0.5 * summary.peak_bytes:
        issues.append(Issue.of("before-history", before / max(summary.peak_bytes, 1)))
    if summary.peak_event >= 0 and not (allocations["layer"] != NO_LAYER).any():
        issues.append(Issue.of("no-layers:snapshot"))
    if summary.ooms:
        issues.append(Issue.of("out-of-memory", times=plural(len(summary.ooms), "time"), largest=max(summary.ooms)))
    return issues
