"""Warnings about operations, calls and ranges of a capture that do not fit together, for every table made from them."""

from __future__ import annotations

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Unjoined
from nvprof_kit._analysis.attribution.nesting import Int64Array, nest
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue


def join_warnings(trace: Trace, ranges: Ranges, unjoined: Unjoined) -> tuple[Issue, ...]:
    """All warnings of this kind about a capture."""
    return (*_launches(trace, unjoined), *_nodes(unjoined), *_open(trace), *_crossing(trace, ranges))


def _launches(trace: Trace, unjoined: Unjoined) -> list[Issue]:
    if not unjoined.unlaunched:
        return []
    total_ns = int((trace.ops["end_ns"] - trace.ops["start_ns"]).sum())
    text = (
        f"{unjoined.unlaunched} of {unjoined.operations} operations were launched by calls that are not in the "
        f"capture (before its window, or dropped), so {unjoined.unlaunched_ns / 1e6:.3f} ms of their time have no "
        "layer; begin and end the window at a synchronize"
    )
    return [Issue("unlaunched", "warning", unjoined.unlaunched_ns / max(total_ns, 1), text)]


def _nodes(unjoined: Unjoined) -> list[Issue]:
    if not unjoined.uncreated:
        return []
    text = (
        f"{unjoined.uncreated} operations replay CUDA graphs that were built outside the collected window, "
        "so they belong to what launched the replay; include the graph's capture in the window"
    )
    return [Issue("uncreated", "warning", unjoined.uncreated / max(unjoined.operations, 1), text)]


def _open(trace: Trace) -> list[Issue]:
    open_count = int(trace.ranges["left_open"].sum())
    if not open_count:
        return []
    text = (
        f"{open_count} ranges were still open when the capture ended and were closed there; end the window "
        "between two steps"
    )
    return [Issue("open-ranges", "note", open_count / len(trace.ranges), text)]


def _crossing(trace: Trace, ranges: Ranges) -> list[Issue]:
    """Push/pop ranges of one domain cannot cross on their thread; those derived from operators can, and those of
    PyTorch traces do by rounding.
    """
    recorded = trace.info.tool.startswith("nsys") and trace.operators is None and "," not in trace.info.domain
    if not (recorded and ranges.crossing):
        return []
    frame = trace.ranges[trace.ranges["nested"].to_numpy()]
    start, end, tid = (frame[column].to_numpy() for column in ("start_ns", "end_ns", "tid"))
    if not nest(start, end, tid).crossing:
        return []
    count = _outlasting(start, end, tid)
    text = (
        f"{count} push/pop ranges of NVTX_EVENTS end after a range that they begin in: start, end or globalTid is "
        "wrong in some of them, so work may have the wrong layer; export or record it again"
    )
    return [Issue("crossing-ranges", "error", count / len(frame), text)]


def _outlasting(start: Int64Array, end: Int64Array, tid: Int64Array) -> int:
    """Number of ranges that end after one that was open when they began."""
    count = 0
    for thread in np.unique(tid):
        on_thread = np.flatnonzero(tid == thread)
        on_thread = on_thread[np.lexsort((-end[on_thread], start[on_thread]))]
        open_ends: list[int] = []
        for range_start, finish in zip(start[on_thread].tolist(), end[on_thread].tolist(), strict=True):
            while open_ends and open_ends[-1] <= range_start:
                open_ends.pop()
            count += bool(open_ends) and finish > open_ends[-1]
            open_ends.append(finish)
    return count
