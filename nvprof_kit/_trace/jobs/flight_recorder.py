"""Dumps of PyTorch's Flight Recorder: the last collectives of one rank.

PyTorch keeps them in a ring buffer if ``TORCH_FR_BUFFER_SIZE`` (in older releases ``TORCH_NCCL_TRACE_BUFFER_SIZE``) is
set, and writes them when a collective times out, or on request: ``torch._C._distributed_c10d._dump_nccl_trace()``, a
pickle, or ``_dump_nccl_trace_json()``. Each rank writes its own file; the file name ends in the rank. The format is
defined by ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, versions 1 and 2.

Times: a collective is *created* when the host enqueues it. A watchdog thread polls its start and end about every 100
ms, so both times are late. Only `duration_ns` is measured on the GPU, and only if ``TORCH_NCCL_ENABLE_TIMING`` is set.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.checks import AGAIN, DAY_NS, check_sizes, check_spans, without_doubles
from nvprof_kit._trace.files.packed import check_file, read_packed
from nvprof_kit._trace.files.plain_pickle import load_plain, one_line
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    import pandas as pd

COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "rank": "rank of the process in the job, -1 where neither the name of the file nor the caller tells (int64)",
        "communicator": "process group or communicator, the same on all its ranks (category)",
        "description": "what it is for, '' if unknown (category)",
        "ranks": "number of its ranks, -1 if unknown (int64)",
        "sequence": "which of its operations of this sort it is, counted alike on all its ranks; -1 unknown (int64)",
        "kind": "all_reduce, all_gather, reduce_scatter, broadcast, send, recv, barrier, … (category)",
        "peer": "the other rank, in the communicator, of a send or recv; -1 of a collective (int64)",
        "bytes": "bytes of the larger buffer of one rank, -1 if unknown (int64)",
        "enqueued_ns": "when the host enqueued it, ns since 1970; -1 unknown (int64)",
        "start_ns": "when it was seen to have started, ns since 1970; -1 unknown (int64)",
        "end_ns": "when it was seen to have ended, ns since 1970; -1 where it has not, or unknown (int64)",
        "duration_ns": "how long it ran on the GPU, waiting included; -1 unknown (int64)",
        "state": "scheduled, started, or completed (category)",
    }
)
"""Columns of the collectives of a rank without a profile, in enqueue order.

``(communicator, kind of counter, sequence)`` identifies one operation on all its ranks. The Flight Recorder has one
counter for collectives and one for sends and receives; the NCCL Inspector has one per kind.
"""

_WIDTHS = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32", "UInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "Double", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes per element by PyTorch dtype name; ``Float8…`` types have one byte."""

_NUMBERED = ("collective_seq_id", "p2p_seq_id")
_NEEDED = (*_NUMBERED, "is_p2p", "profiling_name", "state", "time_created_ns", "input_sizes", "output_sizes")
"""Keys of every entry in a dump of version 2; version 1 has one number, ``seq_id``."""

_STATES = ("", "scheduled", "started", "completed")
_NAME = re.compile(r"(?:\w+:)?_?(\w+?)(?:_base)?(?: \d+(?:->|<-)(\d+))?")
_RANK_OF_FILE = re.compile(r"(?:rank[_.-]?|_)(\d+)(?:\.\w+)*$|^(\d+)$")
_COALESCED = "coalesced"
_MOST = {"rank": 1 << 30, "sequence": 1 << 48, "ranks": 1 << 30, "peer": 1 << 30, "duration_ns": 100 * DAY_NS}


@dataclass(frozen=True)
class FlightDump:
    """The Flight Recorder dump of one rank.

    Attributes:
        path: The file as given by the user.
        version: Format version: ``2.10``.
        rank: The rank; None if neither the file name nor the caller provides it.
        collectives: A table with the columns of `COLLECTIVES`.
    """

    path: str
    version: str
    rank: int | None
    collectives: pd.DataFrame


def read_flight_recorder(path: str | Path, rank: int | None = None) -> FlightDump:
    """Read a dump, pickle or JSON, without executing code from it.

    Args:
        path: The file.
        rank: The rank that wrote it; by default from the file name (``nccl_trace_rank_3``).

    Raises:
        CaptureError: The file cannot be read, or is not a Flight Recorder dump.
    """
    path = Path(path)
    dump = _load(path)
    rank = _rank_of(path) if rank is None else rank
    try:
        rows = _rows(dump, -1 if rank is None else rank)
        table = _table(rows)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, RecursionError) as error:
        why = f"{type(error).__name__} {one_line(error)}"
        raise CaptureError(f"{path}: a Flight Recorder dump with invalid entries ({why})") from None
    check_collectives(path, table)
    return FlightDump(str(path), str(dump.get("version", "")), rank, table)


def check_collectives(named: Path, table: pd.DataFrame) -> None:
    """Reject implausible times, sizes and numbers; -1 means unknown.

    Raises:
        CaptureError: A value is negative or implausible, or a collective ends before it starts.
    """
    for name in ("enqueued_ns", "start_ns", "end_ns", "duration_ns", "rank", "ranks", "sequence", "peer"):
        values = table[name].to_numpy()
        least = 1 if name == "ranks" else 0
        wrong = values[(values != -1) & ((values < least) | (values > _MOST.get(name, 1 << 62)))]
        if len(wrong):
            raise CaptureError(f"{named}: {name} of collectives is {wrong[0]} in {len(wrong)} rows; {AGAIN}")
    sizes = table["bytes"].to_numpy()
    check_sizes(named, "the size of collectives", sizes[sizes != -1])
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    both = (start != -1) & (end != -1)
    check_spans(named, "collectives", start[both], end[both])


def _load(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        with path.open("rb") as file:
            is_json = file.read(64).lstrip()[:1] == b"{"
        if is_json:
            dump = json.loads(read_packed(path), object_pairs_hook=without_doubles)
        else:
            dump = load_plain(path, "Flight Recorder dump")
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{path}: damaged JSON ({one_line(error)}); dump it again") from None
    if not isinstance(dump, dict) or not {"entries", "version"} <= dump.keys() or not _are_dicts(dump["entries"]):
        raise CaptureError(
            f"{path}: not a dump of PyTorch's Flight Recorder: needed version and entries, as _dump_nccl_trace writes "
            "them (with includeCollectives=True)"
        )
    return dump


def _are_dicts(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)


def _rank_of(path: Path) -> int | None:
    found = _RANK_OF_FILE.search(path.name)
    return None if found is None else int(found[1] or found[2])


def _rows(dump: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    sizes = _group_sizes(dump.get("pg_config") or {})
    rows: list[dict[str, Any]] = []
    waiting: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in _whole_entries(dump["entries"]):
        row = _row(entry, rank, sizes)
        key = (row["communicator"], entry.get("collective_seq_id"), entry.get("p2p_seq_id"))
        parts = waiting.pop(key, []) if row["kind"] == _COALESCED else []
        for part in parts:  # only the coalesced group has times
            part.update({name: row[name] for name in ("start_ns", "end_ns", "duration_ns", "state")})
        if not parts:
            rows.append(row)
        if row["kind"] != _COALESCED and row["state"] == "scheduled":
            waiting.setdefault(key, []).append(row)
    return rows


def _whole_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries, checked for the keys that their version has."""
    if not any(key in entry for entry in entries for key in _NUMBERED):
        return entries
    for key in _NEEDED:
        lacking = sum(entry.get(key) is None for entry in entries)
        if lacking:
            raise ValueError(f"{key} is missing in {lacking} of {len(entries)} entries")
    return entries


def _group_sizes(groups: Mapping[str, Any]) -> dict[str, int]:
    """Number of ranks of each process group that lists its ranks."""
    if not isinstance(groups, dict):
        raise ValueError(f"pg_config is {groups!r:.40}")
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise ValueError(f"pg_config: {name} is {group!r:.40}")
        if not isinstance(group.get("ranks") or "", str):
            raise ValueError(f"ranks of pg_config is {group['ranks']!r:.40}, no text")
    members = {name: json.loads(group.get("ranks") or "[]") for name, group in groups.items()}
    return {name: len(ranks) for name, ranks in members.items() if ranks}


def _row(entry: Mapping[str, Any], rank: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    names = entry.get("process_group") or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        raise ValueError(f"process_group is {names!r}, no list of names")
    name, description = (*names, "", "")[:2]
    if entry.get("state", "") not in _STATES:
        raise ValueError(f"state is {entry['state']!r}; needed one of {', '.join(filter(None, _STATES))}")
    if not isinstance(entry.get("is_p2p", False), bool):
        raise ValueError(f"is_p2p is {entry['is_p2p']!r}")
    group = str(name or entry.get("pg_id", ""))
    match = _NAME.fullmatch(entry["profiling_name"])
    kind, peer = match.groups() if match else (entry["profiling_name"], None)
    number = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    duration = entry.get("duration_ms")
    return {
        "rank": rank,
        "communicator": group,
        "description": str(description),
        "ranks": sizes.get(group, -1),
        "sequence": _count(entry, "seq_id" if number not in entry else number),
        "kind": str(kind),
        "peer": -1 if peer is None else int(peer),
        "bytes": max(_bytes(entry, "input"), _bytes(entry, "output")),
        "enqueued_ns": _count(entry, "time_created_ns") or -1,
        "start_ns": _count(entry, "time_discovered_started_ns") or -1,
        "end_ns": _count(entry, "time_discovered_completed_ns") or -1,
        "duration_ns": -1 if duration is None else round(duration * 1e6),
        "state": str(entry.get("state", "")),
    }


def _count(entry: Mapping[str, Any], key: str) -> int:
    """A number or a time that an entry has; -1 if it has none."""
    value = entry.get(key)
    if value is not None and _whole(value) < 0:
        raise ValueError(f"{key} is {value}")
    return -1 if value is None else int(value)


def _whole(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{value!r} is no whole number of 64 bits")
    return value


def _bytes(entry: Mapping[str, Any], side: str) -> int:
    """Bytes of the input or output tensors; -1 if a dtype is unknown. Formats before 2 have no dtypes."""
    shapes, types = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes")
    widths = [_width(str(one)) for one in types] if isinstance(types, Iterable) else []
    if len(widths) != len(shapes) or not all(widths):
        return -1
    if any(_whole(length) < 0 for shape in shapes for length in shape):
        raise ValueError(f"{side}_sizes has a negative length")
    return sum(width * math.prod(shape) for width, shape in zip(widths, shapes, strict=True))


def _width(kind: str) -> int:
    return 1 if kind.startswith("Float8") else _WIDTHS.get(kind, 0)


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    kinds = {name: text.rpartition("(")[2].rstrip(")") for name, text in COLLECTIVES.items()}
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(COLLECTIVES)).astype(kinds)
    return table
