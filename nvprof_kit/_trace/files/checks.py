"""Checks of times, durations and sizes, shared by all readers.

Implausible numbers raise an error or a warning that contains the field's name in the file. They never become a time, a
duration or a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.frames import few
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

Int64Array = npt.NDArray[np.int64]

DAY_NS = 86_400 * 10**9
_LONGEST_DAYS = 100
"""Longer than any capture."""
_EXACT_NS = 1 << 53
_CLOCKS_NS = 100_000
_BLOCK = 1 << 16
_MOST_BYTES = 1 << 50
"""Larger than any size or count on a real machine."""
_LAST_DEVICE = 1023
_SAMPLE, _FEW = 10_000, 20
"""How many events of a kind are looked at to find where most are, and how few are too few."""
AGAIN = "the file is damaged: copy it again, export it again or record it again"


def check_spans(named: str | Path, noun: str, start: Int64Array, end: Int64Array) -> None:
    """Reject spans that end before they begin.

    Args:
        named: The file.
        noun: What the spans are in the file: ``rows of PROFILER_OVERHEAD``.
        start: Start times in ns, shape ``(n,)``.
        end: End times in ns, shape ``(n,)``.

    Raises:
        CaptureError: A span ends before it begins.
    """
    backwards = int(np.count_nonzero(end < start))
    if backwards:
        raise CaptureError(f"{named}: {backwards} {noun} end before they begin; {AGAIN}")


def check_total(named: str | Path, noun: str, start: Int64Array, end: Int64Array) -> None:
    """Reject spans whose durations together are too long to be added up exactly as floating-point numbers.

    Raises:
        CaptureError: They last more than 2**53 ns, 104 days, together.
    """
    total = float(np.sum(end, dtype=np.float64) - np.sum(start, dtype=np.float64))
    if total > _EXACT_NS:
        raise CaptureError(
            f"{named}: start and end of {len(start)} {noun}: together they last {total / DAY_NS:,.0f} days, more than "
            f"the {_EXACT_NS // DAY_NS} that can be added up; {AGAIN}"
        )


def check_moments(named: str | Path, columns: Iterable[Int64Array]) -> None:
    """Reject a file if its timestamps are too far apart for exact sums.

    Raises:
        CaptureError: They are more than 100 days apart.
    """
    edges = [(int(times.min()), int(times.max())) for times in columns if len(times)]
    if not edges:
        return
    first, last = min(low for low, _ in edges), max(high for _, high in edges)
    if last - first > _LONGEST_DAYS * DAY_NS:
        raise CaptureError(f"{named}: times from {first} to {last} ns, more than {_LONGEST_DAYS} days apart; {AGAIN}")


def strays(starts: Mapping[str, Int64Array]) -> tuple[str, ...]:
    """Warnings about events that lie more than an hour, and a hundred times as long as nearly all others last together,
    before or after the others.

    Args:
        starts: Start times in ns by the name of the events in the file.
    """
    sampled = [times[:: max(len(times) // _SAMPLE, 1)] for times in starts.values()]
    sample = np.concatenate([np.empty(0, dtype=np.int64), *sampled])
    if len(sample) < _FEW:
        return ()
    first, median, last = np.quantile(sample, (0.02, 0.5, 0.98), method="nearest")
    limit = max(100 * int(last - first), 3600 * 10**9)
    counts = {name: int(np.count_nonzero(np.abs(times - int(median)) > limit)) for name, times in starts.items()}
    return tuple(
        f"ts of {name} lies hours away from the rest of the trace in {count} events; what they tell is wrong"
        for name, count in counts.items()
        if count
    )


def check_after_zero(tables: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Warnings about events that begin before the capture's zero, by the names of their tables in the file."""
    counts = {name: int(np.count_nonzero(table["start_ns"] < 0)) for name, table in tables.items()}
    return tuple(
        f"{name}.start is negative in {count} rows: the events lie before the capture began; times that hold them are "
        "wrong"
        for name, count in counts.items()
        if count
    )


def check_flags(named: str | Path, noun: str, values: Int64Array) -> None:
    """Reject values other than 0 and 1.

    Raises:
        CaptureError: There is another value.
    """
    wrong = values[(values != 0) & (values != 1)]
    if len(wrong):
        raise CaptureError(f"{named}: {noun} is {wrong[0]} in {len(wrong)} rows, needed 0 or 1; {AGAIN}")


def check_sizes(named: str | Path, noun: str, sizes: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> None:
    """Reject sizes, counts and shares that are negative, NaN or implausibly large.

    Args:
        named: The file.
        noun: Their name in the file: ``CUPTI_ACTIVITY_KIND_MEMCPY.bytes``.
        sizes: The values without missing ones, shape ``(n,)``.

    Raises:
        CaptureError: One of them is negative, NaN, or above 2**50.
    """
    wrong = sizes[~((sizes >= 0) & (sizes <= _MOST_BYTES))]
    if len(wrong):
        raise CaptureError(f"{named}: {noun} is {wrong[0]} in {len(wrong)} rows; {AGAIN}")


def check_devices(named: str | Path, noun: str, devices: Int64Array) -> None:
    """Reject device ordinals that no machine has.

    Raises:
        CaptureError: One is negative or above 1023.
    """
    wrong = devices[(devices < 0) | (devices > _LAST_DEVICE)]
    if len(wrong):
        raise CaptureError(f"{named}: {noun} is {wrong[0]} in {len(wrong)} rows; {AGAIN}")


def whole_ns(named: str | Path, noun: str, microseconds: npt.NDArray[np.float64], origin_us: float = 0.0) -> Int64Array:
    """Convert microseconds to integer nanoseconds.

    Args:
        named: The file.
        noun: Their name in the file: ``dur of kernel``.
        microseconds: The values, shape ``(n,)``.
        origin_us: The origin to subtract.

    Raises:
        CaptureError: A value is not a number or exceeds int64.
    """
    nanoseconds = np.rint((microseconds - origin_us) * 1000)
    wrong = microseconds[~(np.abs(nanoseconds) < 2**62)]
    if len(wrong):
        raise CaptureError(f"{named}: {noun} is {wrong[0]} in {len(wrong)} events; {AGAIN}")
    return nanoseconds.astype(np.int64)


def repeated(*keys: Int64Array) -> int:
    """Number of duplicate rows, by the keys that identify a row; the first key is the row's time."""
    times = keys[0]
    if len(times) < 2:
        return 0
    order = np.argsort(times, kind="stable")
    tied = times[order[1:]] == times[order[:-1]]
    ties = order[np.append(tied, False) | np.append(False, tied)]
    ties = ties[np.lexsort([key[ties] for key in keys])]
    same = np.ones(max(len(ties) - 1, 0), dtype=bool)
    for key in keys:
        same &= key[ties[1:]] == key[ties[:-1]]
    return int(np.count_nonzero(same))


def check_operations(named: str | Path, ops: Mapping[str, Any], api: Mapping[str, Any]) -> tuple[Issue, ...]:
    """Reject impossible operations and return warnings about suspicious ones.

    Args:
        named: The file.
        ops: Columns of the schema's ``ops``.
        api: Columns of the schema's ``api``.

    Returns:
        Warnings about duplicate rows and about operations that begin before their launch.

    Raises:
        CaptureError: An operation ends before it begins, moves fewer than 0 bytes, or runs on no device.
    """
    check_spans(named, "operations", ops["start_ns"], ops["end_ns"])
    check_total(named, "operations", ops["start_ns"], ops["end_ns"])
    check_devices(named, "the device of operations", ops["device"])
    if "bytes" in ops:
        check_sizes(named, "the size of copies and memsets", ops["bytes"][ops["bytes"] != -1])
    doubles = repeated(*(ops[key] for key in ("start_ns", "end_ns", "device", "pid", "correlation", "graph_node")))
    before = early(ops, api)
    count, issues = max(len(ops["start_ns"]), 1), []
    if doubles:
        text = f"{doubles} operations stand in the file twice, and count twice; export or record it again"
        issues.append(Issue("repeated", "error", doubles / count, text))
    if before:
        text = (
            f"{before} operations begin before the call that launched them; the clocks of CPU and GPU, or the "
            "correlation ids, are wrong: do not trust idle and queue times"
        )
        issues.append(Issue("early", "error", before / count, text))
    return tuple(issues)


def early(ops: Mapping[str, Any], api: Mapping[str, Any]) -> int:
    """Number of operations that begin before all calls with their correlation id. CPU and GPU clocks are aligned to
    within a few microseconds, so smaller differences are ignored.
    """
    count = 0
    for process in few(api["pid"]).tolist():
        calls, is_of_process = api["pid"] == process, (ops["pid"] == process) & (ops["correlation"] >= 0)
        ids, start = api["correlation"][calls], api["start_ns"][calls]
        call_ids, first = ids, start
        if not (ids[1:] > ids[:-1]).all():
            order = np.argsort(ids, kind="stable")  # correlation ids come from a counter, so they are nearly sorted
            ids = ids[order]
            changes = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
            call_ids, first = ids[changes], np.minimum.reduceat(start[order], changes)
            del order
        del ids, start
        correlations, begun = ops["correlation"][is_of_process], ops["start_ns"][is_of_process]
        for block in range(0, len(correlations), _BLOCK):
            ids_of_block = correlations[block : block + _BLOCK]
            position = np.minimum(np.searchsorted(call_ids, ids_of_block), len(call_ids) - 1)
            is_early = begun[block : block + _BLOCK] < first[position] - _CLOCKS_NS
            count += int(np.count_nonzero(is_early & (call_ids[position] == ids_of_block)))
    return count


class DoubleKey(ValueError):
    """An object of a JSON file has a key twice: readers would silently take one of its values."""


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The ``object_pairs_hook`` of `json.loads` for files in which a second value would change the result.

    Raises:
        DoubleKey: A key appears twice.
    """
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in mapping if keys.count(key) > 1)
        raise DoubleKey(f"the key {double[:80]!r} appears twice in an object")
    return mapping
