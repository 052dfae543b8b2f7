"""Reference implementation: the late rank of each collective of two ranks, and the wait, by plain SQL and Python.

Kernels of NCCL are paired by their order alone. The clocks' offset is the one at which most pairs end together: the
middle of the densest stretch of differences, and no median of the package's. Of sends and receives it is a bound: no
receive ends before its send. Each direction bounds it from one side; where receivers waited, the bound is the offset.
PyTorch's traces of ranks of one host need none: their times are all on the host's clock.
"""

import json
import lzma
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """One collective: the late rank, and how long the other waited, in ns."""

    late_rank: int
    wait_ns: int


def kernels(path: Path) -> list[tuple[int, int]]:
    """Start and end of NCCL's kernels, in order."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute(
            'SELECT k.start, k."end" FROM CUPTI_ACTIVITY_KIND_KERNEL AS k '
            "JOIN StringIds AS s ON s.id = k.demangledName WHERE s.value LIKE 'ncclDevKernel%' ORDER BY k.start"
        ).fetchall()


def offset(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """What is added to the second's times: the middle of the shortest stretch that holds half of the differences."""
    apart = sorted(one[1] - other[1] for one, other in zip(first, second, strict=True))
    half = len(apart) // 2
    width, begin = min((apart[place + half] - apart[place], place) for place in range(len(apart) - half))
    return apart[begin] + width // 2


def receives(path: Path) -> list[bool]:
    """Of each of NCCL's kernels, in order, whether it receives, by NCCL's own range around its launch."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        calls = db.execute(
            "SELECT coalesce(e.text, s.value) FROM NVTX_EVENTS AS e LEFT JOIN StringIds AS s ON s.id = e.textId "
            "WHERE coalesce(e.text, s.value) IN ('ncclSend', 'ncclRecv') ORDER BY e.start"
        ).fetchall()
    return [name == "ncclRecv" for (name,) in calls]


def offset_of_messages(first: list[tuple[int, int]], second: list[tuple[int, int]], first_receives: list[bool]) -> int:
    """What is added to the second's times: the bound whose receivers waited longest."""
    pairs = list(zip(first, second, first_receives, strict=True))
    apart = {is_receiver: [a[1] - b[1] for a, b, one in pairs if one is is_receiver] for is_receiver in (True, False)}
    waited = {
        True: sum(a[1] - a[0] for a, _, one in pairs if one),
        False: sum(b[1] - b[0] for _, b, one in pairs if not one),
    }
    return min(apart[True]) if waited[True] >= waited[False] else max(apart[False])


def late(first: Path, second: Path) -> list[Pair]:
    """Every collective of two ranks, in order."""
    a, b = kernels(first), kernels(second)
    messages = receives(first)
    shift = offset_of_messages(a, b, messages) if len(messages) == len(a) else offset(a, b)
    return _late(a, b, shift)


def late_in_traces(first: Path, second: Path) -> list[Pair]:
    """The same of PyTorch's traces of two ranks of one host, on its clock."""
    return _late(traced(first), traced(second), shift=0)


def late_in_both(first: Path, second: Path) -> list[Pair]:
    """The same of a capture by nsys and a PyTorch trace of one run, which have no clock in common."""
    a, b = (kernels(path) if path.suffix == ".sqlite" else traced(path) for path in (first, second))
    return _late(a, b, offset(a, b))


def traced(path: Path) -> list[tuple[int, int]]:
    """Start and end of NCCL's kernels in a packed PyTorch trace, in order."""
    nccl = [event for event in events(path) if event["cat"] == "kernel" and event["name"].startswith("ncclDevKernel")]
    return sorted((round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))) for event in nccl)


def events(path: Path) -> list[dict[str, Any]]:
    """The operations, calls and ranges of a packed PyTorch trace."""
    trace = json.loads(lzma.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in trace if event["ph"] == "X" and event["cat"] != "Trace"]


def _late(a: list[tuple[int, int]], b: list[tuple[int, int]], shift: int) -> list[Pair]:
    found = []
    for (one, one_end), (other, other_end) in zip(a, [(start + shift, end + shift) for start, end in b], strict=True):
        last = max(one, other)
        # the root of a broadcast may be done before the other rank comes: it does not wait for it
        until = min(last, one_end if one < other else other_end)
        found.append(Pair(int(other > one), until - min(one, other)))
    return found
