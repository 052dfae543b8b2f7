"""Logs of the NCCL Inspector, NCCL's profiler plugin: each collective of one process.

The plugin (``plugins/profiler/inspector`` of NCCL, in 2.28 ``ext-profiler/inspector``) writes one file per process with
one JSON object per line (see its ``inspector_json.cc``). It logs start and end times only with
``NCCL_INSPECTOR_DUMP_VERBOSE=1``; otherwise only durations, and `start_ns` and `end_ns` are -1. It omits messages below
``NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES`` (8192; older versions log all) and records dropped from its ring buffer.

Times: a host thread observes the begin and end of the kernel's channels in whole microseconds; `duration_ns` is
measured on the GPU if the log says ``kernel_gpu``. `rank` is the rank in the communicator, which equals the job's rank
only if the communicator contains all ranks. `sequence` counts each kind separately.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._trace.files.checks import AGAIN
from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit._trace.files.plain_pickle import one_line
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.jobs.flight_recorder import COLLECTIVES, check_collectives
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "Send": "send",
    "Recv": "recv",
    "AlltoAll": "all_to_all",
}
_ALWAYS = (
    *("rank", "n_ranks", "coll_sn", "coll_msg_size_bytes", "coll_exec_time_us"),
    *("p2p_sn", "p2p_msg_size_bytes", "p2p_exec_time_us", "p2p_peer"),
)
"""Fields that every version of the inspector writes."""
_ABSURD = (1 << 62) + 1
_OF_ALL_RANKS = ("all_gather", "reduce_scatter")
"""Kinds with a message size that is one rank's part of the larger buffer."""


def read_nccl_inspector(path: str | Path) -> pd.DataFrame:
    """Read a process's log.

    Returns:
        The completed collectives, sends and receives, with the columns of `flight_recorder.COLLECTIVES`. An incomplete
        last line is skipped.

    Raises:
        CaptureError: The file cannot be read, or is not an NCCL Inspector log.
    """
    path = Path(path)
    try:
        content = read_packed(path)
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    import pyarrow as pa
    import pyarrow.json

    whole = content[: content.rfind(b"\n") + 1]
    if not whole.strip():
        raise CaptureError(
            f"{path}: {'no whole line' if content else 'an empty file'}; needed a log of the NCCL Inspector"
        )
    options = pyarrow.json.ParseOptions(explicit_schema=_schema(), unexpected_field_behavior="ignore")
    try:
        read = pyarrow.json.read_json(io.BytesIO(whole), parse_options=options)
    except pa.ArrowInvalid as error:
        raise CaptureError(
            f"{path}: not a log of the NCCL Inspector, or damaged ({one_line(error)}); needed a JSON object a line "
            "with header and coll_perf or p2p_perf"
        ) from None
    return _table(path, read.combine_chunks())


def _schema() -> pa.Schema:
    """The fields read from each line; others are ignored."""
    import pyarrow as pa

    kernel = pa.struct([("kernel_start_ts", pa.int64()), ("kernel_stop_ts", pa.int64())])

    def perf(kind: str) -> pa.DataType:
        times = pa.struct([(f"{kind}_start_ts", pa.int64()), ("kernel_events", pa.list_(kernel))])
        numbers = [(f"{kind}_{name}", pa.int64()) for name in ("sn", "msg_size_bytes", "exec_time_us", "peer")]
        return pa.struct([(kind, pa.string()), *numbers, ("event_trace_ts", times)])

    header = pa.struct([("id", pa.string()), ("comm_name", pa.string()), ("rank", pa.int64()), ("n_ranks", pa.int64())])
    return pa.schema([("header", header), ("coll_perf", perf("coll")), ("p2p_perf", perf("p2p"))])


def _table(path: Path, read: pa.Table) -> pd.DataFrame:
    import pandas as pd
    import pyarrow.compute as pc

    def column(*names: str) -> Any:
        found = read.column(names[0])
        for name in names[1:]:
            found = pc.struct_field(found, name)
        return found.combine_chunks()

    def of_either(name: str) -> Any:
        return pc.coalesce(column("coll_perf", f"coll{name}"), column("p2p_perf", f"p2p{name}"))

    def numbers(values: Any) -> Any:
        return pc.fill_null(values, -1).to_numpy(zero_copy_only=False).astype(np.int64)

    call, id_ = of_either(""), column("header", "id")
    if call.null_count or id_.null_count:
        line = 1 + int(np.argmax(pc.or_(pc.is_null(call), pc.is_null(id_)).to_numpy(zero_copy_only=False)))
        raise CaptureError(
            f"{path}: line {line} is not from the NCCL Inspector: needed header and coll_perf or p2p_perf"
        )
    for kind in ("coll", "p2p"):
        mine = pc.is_valid(column(f"{kind}_perf", kind)).to_numpy(zero_copy_only=False)
        paths: list[tuple[str, ...]] = [
            (f"{kind}_perf", f"{kind}_{name}") for name in ("sn", "msg_size_bytes", "exec_time_us")
        ]
        paths += [(f"{kind}_perf", "event_trace_ts", f"{kind}_start_ts"), ("header", "rank"), ("header", "n_ranks")]
        for names in (*paths, *([("p2p_perf", "p2p_peer")] if kind == "p2p" else [])):
            _check_field(path, ".".join(names), column(*names), mine, always=names[-1] in _ALWAYS)
    start, end = _kernel_times(column("coll_perf", "event_trace_ts", "kernel_events"), len(read))
    p2p_start, p2p_end = _kernel_times(column("p2p_perf", "event_trace_ts", "kernel_events"), len(read))
    kind = _labels(call, _KINDS)
    ranks, size, lasted = (
        numbers(column("header", "n_ranks")),
        numbers(of_either("_msg_size_bytes")),
        numbers(of_either("_exec_time_us")),
    )
    whole = np.isin(np.asarray(kind), _OF_ALL_RANKS) & (size >= 0)
    enqueued = pc.coalesce(
        column("coll_perf", "event_trace_ts", "coll_start_ts"), column("p2p_perf", "event_trace_ts", "p2p_start_ts")
    )
    table: pd.DataFrame = pd.DataFrame(
        {
            "rank": numbers(column("header", "rank")),
            "communicator": _labels(id_, {}),
            "description": _labels(pc.fill_null(column("header", "comm_name"), ""), {"unknown": ""}),
            "ranks": ranks,
            "sequence": numbers(of_either("_sn")),
            "kind": kind,
            "peer": numbers(column("p2p_perf", "p2p_peer")),
            "bytes": np.where(whole, _of_all(size, ranks), size),
            "enqueued_ns": _in_ns(numbers(enqueued)),
            "start_ns": _in_ns(np.maximum(start, p2p_start)),
            "end_ns": _in_ns(np.maximum(end, p2p_end)),
            "duration_ns": _in_ns(lasted),
            "state": labels(np.zeros(len(read), dtype=np.int64), ["completed"]),
        },
        columns=list(COLLECTIVES),
    )
    check_collectives(path, table)
    if (beyond := (table["rank"] >= table["ranks"]) & (table["ranks"] > 0)).any():
        raise CaptureError(f"{path}: header.rank is no rank of header.n_ranks in {beyond.sum()} rows; {AGAIN}")
    return table


def _check_field(path: Path, name: str, values: Any, mine: Any, *, always: bool) -> None:
    """Reject a field that only some of these lines have, or that is negative. A field that all lack is unknown, unless
    the inspector always writes it.

    Raises:
        CaptureError: It is so.
    """
    import pyarrow.compute as pc

    given = pc.is_valid(values).to_numpy(zero_copy_only=False)[mine]
    lacking = int(np.count_nonzero(~given))
    if lacking and (always or lacking < len(given)):
        raise CaptureError(f"{path}: {name} is missing in {lacking} of {len(given)} lines that need it; {AGAIN}")
    found = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)[mine]
    if (negative := found < 0).any():
        raise CaptureError(f"{path}: {name} is {found[negative][0]} in {int(negative.sum())} lines; {AGAIN}")


def _of_all(size: Any, ranks: Any) -> Any:
    """One rank's part times the number of ranks; -1 if unknown. Implausible values are kept, so that the checks reject
    them.
    """
    absurd = size.astype(np.float64) * ranks > _ABSURD
    return np.where(ranks <= 0, -1, np.where(absurd, _ABSURD, np.where(absurd, 0, size) * ranks))


def _in_ns(micros: Any) -> Any:
    """Microseconds as ns. 0 means unknown and becomes -1. Implausible values are kept for the checks to reject."""
    small = np.clip(micros, -(1 << 52), 1 << 52)
    return np.where((micros == 0) | (micros == -1), -1, np.where(small == micros, small * 1000, _ABSURD))


def _labels(texts: Any, renamed: dict[str, str]) -> Any:
    encoded = texts.dictionary_encode()
    names = [renamed.get(name, name) for name in encoded.dictionary.to_pylist()]
    return labels(encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), names)


def _kernel_times(events: Any, rows: int) -> tuple[Any, Any]:
    """First begin and last end in µs over each row's channels; -1 if unknown (0 in the log)."""
    import pyarrow.compute as pc

    parents = pc.list_parent_indices(events).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(events)
    begin, end = (
        pc.fill_null(pc.struct_field(flat, name), 0).to_numpy(zero_copy_only=False)
        for name in ("kernel_start_ts", "kernel_stop_ts")
    )
    first, last = np.full(rows, np.iinfo(np.int64).max), np.full(rows, -1, dtype=np.int64)
    np.minimum.at(first, parents[begin > 0], begin[begin > 0])
    np.maximum.at(last, parents[end > 0], end[end > 0])
    return np.where(first == np.iinfo(np.int64).max, -1, first), last
