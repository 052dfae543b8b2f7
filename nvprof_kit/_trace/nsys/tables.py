"""Readers of the nsys tables behind a `Trace`, one per table of the schema."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Int64Array, Where
from nvprof_kit._trace.frames import MISSING_PAYLOAD, distinct, distinct_rows, few, labels
from nvprof_kit._trace.nsys.sources import (
    EVENT_TYPES,
    check_rows,
    defined,
    node_table,
    read_columns,
    strings_of,
    zero_is_missing,
)
from nvprof_kit._trace.reader import named_domains

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
Columns = dict[str, Any]

_PID_MASK = ~0xFFFFFF  # globalTid: hardware id, VM, process, and thread in the low 24 bits (nsys user guide)
_LAUNCHING = ("%Launch%", "%Memcpy%", "%Memset%", "%GraphUpload%", "%MemPrefetch%")
_NESTED, _START_END = (59, 70), (60, 71)
_BLOCK = 1 << 16
_NAMELESS = -1  # the value for a NULL nameId
_CATEGORY, _DOMAIN_CREATE = 33, 75
_DEFAULT_DOMAIN = 0
_OPEN = (0, -1)
"""What exporters write as the end of a range that was still open, besides NULL."""


def process_of(tid: Int64Array) -> Int64Array:
    """The process keys (globalPid) of thread keys (globalTid)."""
    return tid & _PID_MASK


# ---------------------------------------------------------------- NVTX


@dataclass(frozen=True)
class Domains:
    """NVTX domains of a capture: the (process, domain id) pairs of each name, and the names of their categories."""

    by_name: Mapping[str, frozenset[tuple[int, int]]]
    categories: Mapping[tuple[int, int, int], str]


def nvtx_domains(db: Database) -> Domains:
    """The registered domains and categories; a domain id is only valid within its process."""
    if "NVTX_EVENTS" not in db.tables:
        return Domains({}, {})
    registrations = db.rows(
        "NVTX_EVENTS",
        ("eventType", "globalTid", "domainId", "category", "text", "textId"),
        [Where("eventType", (_CATEGORY, _DOMAIN_CREATE))],
    )
    strings = db.texts_of_ids({row[-1] for row in registrations if isinstance(row[-1], int)})
    names: dict[str, set[tuple[int, int]]] = {}
    categories: dict[tuple[int, int, int], str] = {}
    for kind, tid, domain, category, unregistered, text_id in registrations:
        text = strings.get(text_id, "" if unregistered is None else unregistered)
        noun = "domain" if kind == _DOMAIN_CREATE else "category"
        faults = (  # without id or name its ranges would be assigned to another one
            (not isinstance(domain, int), f"domainId is {domain!r}"),
            (kind == _CATEGORY and not isinstance(category, int), f"category is {category!r}"),
            (not isinstance(text, str), "text is not text"),
            (not text, "text and textId give no name"),
        )
        if fault := next((sentence for is_wrong, sentence in faults if is_wrong), ""):
            raise db.refuse(f"NVTX_EVENTS.{fault} where a {noun} is registered")
        if not isinstance(tid, int):
            check_rows(db, ("NVTX_EVENTS",))
            continue
        pid = tid & _PID_MASK
        if kind == _DOMAIN_CREATE:
            names.setdefault(text, set()).add((pid, domain))
        elif category is not None:
            categories[pid, domain, category] = text
    return Domains({name: frozenset(keys) for name, keys in names.items()}, categories)


def has_categories(domains: Domains, domain: str) -> bool:
    """Whether a program registered categories in the domain, or in one of several separated by commas."""
    pairs = _pairs_of(domains, domain)
    default = "" in named_domains(domain, domains.by_name)
    return any((pid, id_) in pairs or (default and id_ == _DEFAULT_DOMAIN) for pid, id_, _ in domains.categories)


def has_ranges(db: Database, domains: Domains, domain: str) -> bool:
    """Whether the capture has ranges of a domain, or of one of several separated by commas."""
    ids = _domain_ids(domains, domain)
    if "NVTX_EVENTS" not in db.tables or not ids:
        return False
    is_of_domain = Where("domainId", ids, or_invalid=_DEFAULT_DOMAIN in ids)
    return bool(db.rows("NVTX_EVENTS", ("start",), [Where("eventType", _NESTED + _START_END), is_of_domain], limit=1))


def read_ranges(db: Database, domains: Domains, domain: str) -> Columns:
    """Columns of the schema's ``ranges`` for one domain, or several separated by commas. A range without an end is
    open; exporters before 2022 wrote 0 for it.
    """
    read = read_nvtx(db, domains, domain, _NESTED + _START_END)
    is_open = (read["end"] < read["start"]) & np.isin(read["end"], (*_OPEN, MISSING_PAYLOAD))
    return {
        "start_ns": read["start"],
        "end_ns": read["end"].copy(),
        "nested": np.isin(read["kind"], _NESTED),
        "left_open": is_open,
        **{name: read[name] for name in ("pid", "tid", "category", "text", "payload")},
    }


def read_nvtx(db: Database, domains: Domains, domain: str, kinds: tuple[int, ...]) -> Columns:
    """Events of these kinds of one domain, or several separated by commas: start, end, kind, pid, tid, category, text
    and payload; `MISSING_PAYLOAD` means a missing end or payload. Events of unknown types and domains are read too, and
    cause a warning.
    """
    if "NVTX_EVENTS" not in db.tables:
        empty = np.empty(0, dtype=np.int64)
        numbers = dict.fromkeys(("start", "end", "kind", "tid", "payload", "pid"), empty)
        return {**numbers, "category": labels(empty, [""]), "text": labels(empty, [""])}
    pairs, types = _pairs_of(domains, domain), defined(db, EVENT_TYPES)
    registered = {pair for domain_ids in domains.by_name.values() for pair in domain_ids}
    other_ids = {_DEFAULT_DOMAIN, *(id_ for _, id_ in registered)} - _domain_ids(domains, domain)
    read = read_columns(
        db,
        "NVTX_EVENTS",
        {
            "start": "start",
            "end": "end",
            "kind": "eventType",
            "tid": "globalTid",
            "domain": "domainId",
            "category": "category",
            "text_id": "textId",
            "text": "text",
            "payload": ("uint64Value", "int64Value", "uint32Value", "int32Value"),
        },
        where=[
            Where("eventType", types - {*kinds}, excluded=True, or_invalid=True),
            Where("domainId", other_ids, excluded=True, or_invalid=True),
        ],
        missing=MISSING_PAYLOAD,
        texts=("text",),
    )
    read["domain"] = np.where(read["domain"] == MISSING_PAYLOAD, _DEFAULT_DOMAIN, read["domain"])
    pid = process_of(read["tid"])
    keep = read["domain"] == _DEFAULT_DOMAIN
    for process, id_ in pairs:
        keep |= (pid == process) & (read["domain"] == id_)
    if not keep.all():
        (pids, ids), index = distinct_rows(pid[~keep], read["domain"][~keep])
        unregistered = [pair not in registered for pair in zip(pids.tolist(), ids.tolist(), strict=True)]
        if count := int(np.array(unregistered)[index].sum()):
            db.warn(f"NVTX_EVENTS.domainId or globalTid of {count} events names a domain that their process has not "
                    "registered: they are not read")  # fmt: skip
    if (unknown := ~np.isin(read["kind"], kinds)).any():
        db.warn(f"NVTX_EVENTS.eventType is unknown in {int(unknown.sum())} events, which are not read: "
                + ", ".join(map(str, np.unique(read["kind"][unknown])[:5])))  # fmt: skip
        keep &= ~unknown
    if not keep.all():
        read, pid = {name: values[keep] for name, values in read.items()}, pid[keep]
    ids, index = np.unique(read["text_id"], return_inverse=True)
    strings, has_no_id = strings_of(db, ids), read["text_id"] < 0
    texts = [strings.get(id_, "") for id_ in ids.tolist()]
    if has_no_id.any():  # its text is in the row itself
        import pandas as pd

        text = pd.Categorical(np.where(has_no_id, read["text"], np.array(texts, dtype=object)[index]))
    else:
        text = labels(index, texts)
    columns, index = distinct_rows(pid, read["domain"], read["category"])
    keys = [column.tolist() for column in columns]
    return {
        **{name: read[name] for name in ("start", "end", "kind", "tid", "payload")},
        "pid": pid,
        "category": labels(index, [domains.categories.get(row, "") for row in zip(*keys, strict=True)]),
        "text": text,
    }


def _pairs_of(domains: Domains, domain: str) -> set[tuple[int, int]]:
    """The (process, domain id) pairs of the requested domains, except the default domain."""
    names = named_domains(domain, domains.by_name)
    return {pair for name in names for pair in domains.by_name.get(name, ())}


def _domain_ids(domains: Domains, domain: str) -> set[int]:
    """The ids of the requested domains in any process."""
    ids = {id_ for _, id_ in _pairs_of(domains, domain)}
    return ids | {_DEFAULT_DOMAIN} if "" in named_domains(domain, domains.by_name) else ids


def handed_over(db: Database, domains: Domains, domain: str) -> int:
    """Number of ranges of the domain that end on a different thread."""
    if "NVTX_EVENTS" not in db.tables:
        return 0
    ids, pairs = _domain_ids(domains, domain), _pairs_of(domains, domain)
    rows = db.rows(
        "NVTX_EVENTS",
        ("globalTid", "endGlobalTid", "domainId"),
        [Where("eventType", _START_END), Where("domainId", ids, or_invalid=_DEFAULT_DOMAIN in ids)],
    )
    return sum(
        end_tid is not None and end_tid != tid and (not id_ or (tid & _PID_MASK, id_) in pairs)
        for tid, end_tid, id_ in rows
        if isinstance(tid, int)
    )


def close_open_ranges(db: Database, ranges: Columns, api: Columns, ops: Columns) -> None:
    """Close open ranges at the end of the capture, the last timestamp in it."""
    still_open = ranges["left_open"]
    if still_open.any():
        ends = [
            int(values.max())
            for values in (ranges["end_ns"], ranges["start_ns"], api["start_ns"], ops["end_ns"])
            if len(values)
        ]
        if RUNTIME in db.tables:
            ends += [int(db.columns(RUNTIME, {"end": "end"}, missing=MISSING_PAYLOAD)["end"].max(initial=0))]
        ranges["end_ns"][still_open] = max(ends)


# ---------------------------------------------------------------- CUDA API


def read_launches(db: Database, timed: bool = False) -> Columns:
    """Columns of the schema's ``api``: the calls with names of launches, copies and memsets.

    Args:
        db: The export.
        timed: Whether to read durations.
    """
    return read_and_count_launches(db, timed, ())[0]


def read_and_count_launches(db: Database, timed: bool, name_ids: Collection[int]) -> tuple[Columns, int]:
    """The same, and how many of these calls have one of the names `name_ids`: a query of its own takes longer."""
    where = Where("nameId", db.ids_like(*_LAUNCHING), or_invalid=True)
    api = _read_api(db, timed, where, named=bool(name_ids))
    return api, int(np.isin(api.pop("name"), [*name_ids]).sum()) if "name" in api else 0


def launches_among(db: Database, calls: Columns, timed: bool = False) -> Columns:
    """The same from calls that are already read, with start_ns, end_ns, tid, correlation and name."""
    name = calls["name"]
    distinct_names, code = distinct(name)
    launching = np.isin(distinct_names, np.array([*db.ids_like(*_LAUNCHING), _NAMELESS], dtype=np.int64))
    rows = np.flatnonzero(launching[code])
    start, tid = calls["start_ns"][rows], calls["tid"][rows]
    lengths = {"duration_ns": calls["end_ns"][rows] - start} if timed else {}
    return {"start_ns": start, "tid": tid, "pid": process_of(tid), "correlation": calls["correlation"][rows], **lengths}


def _read_api(db: Database, timed: bool, where: Where, named: bool = False) -> Columns:
    names = ("start_ns", "tid", "correlation", *(["name"] if named else []))
    if RUNTIME not in db.tables:
        return {name: np.empty(0, dtype=np.int64) for name in (*names, "pid", *(["duration_ns"] if timed else []))}
    sources = {"start_ns": "start", "tid": "globalTid", "correlation": "correlationId"}
    sources |= ({"end_ns": "end"} if timed else {}) | ({"name": "nameId"} if named else {})
    api = read_columns(db, RUNTIME, sources, where=[where])
    if timed:
        api["duration_ns"] = api.pop("end_ns") - api["start_ns"]
    return api | {"pid": process_of(api["tid"])}


def with_missed_launches(db: Database, api: Columns, ops: Columns) -> Columns:
    """Add calls with other names that share a correlation id with an operation."""
    orphans = {process: _orphans(process, ops, api) for process in few(ops["pid"]).tolist()}
    if not any(map(len, orphans.values())) or RUNTIME not in db.tables:
        return api
    other_calls = _read_api(db, "duration_ns" in api, Where("nameId", db.ids_like(*_LAUNCHING), excluded=True))
    keep = np.zeros(len(other_calls["pid"]), dtype=bool)
    for process, ids in orphans.items():
        keep |= (other_calls["pid"] == process) & np.isin(other_calls["correlation"], ids)
    return {name: np.concatenate([api[name], other_calls[name][keep]]) for name in api} if keep.any() else api


def _orphans(process: int, ops: Columns, api: Columns) -> Int64Array:
    """The correlation ids of a process's operations without a call. Ids come from a counter, so they are nearly sorted
    in both tables.
    """
    ids = ops["correlation"][(ops["pid"] == process) & (ops["correlation"] >= 0)]
    launched = api["correlation"][api["pid"] == process]
    launched = launched if (launched[1:] >= launched[:-1]).all() else np.sort(launched)
    order = np.append(launched, np.iinfo(np.int64).max)
    blocks = (ids[start : start + _BLOCK] for start in range(0, len(ids), _BLOCK))
    missing = [block[order[np.searchsorted(order, block)] != block] for block in blocks]
    return np.concatenate(missing) if missing else ids


# ---------------------------------------------------------------- CUDA graphs


def read_graph_nodes(db: Database) -> Columns:
    """Columns of the schema's ``graph_nodes``."""
    names = ("node", "original", "start_ns", "tid", "pid")
    table = node_table(db)
    if table is None:
        return {name: np.empty(0, dtype=np.int64) for name in names}
    sources = {"node": "graphNodeId", "original": "originalGraphNodeId", "start": "start", "tid": "globalTid"}
    read = read_columns(db, table, sources)
    return {
        "node": read["node"],
        "original": zero_is_missing(read["original"]),
        "start_ns": read["start"],
        "tid": read["tid"],
        "pid": process_of(read["tid"]),
    }


# ---------------------------------------------------------------- the machine


def known_devices(db: Database) -> dict[int, str]:
    """GPU names by CUDA ordinal; empty if the capture does not list its GPUs."""
    if not db.has("TARGET_INFO_GPU", "name", "id"):
        return {}
    ordinal = "cuDevice" if db.has("TARGET_INFO_GPU", "cuDevice") else "id"
    gpus = sorted(db.rows("TARGET_INFO_GPU", (ordinal, "id", "name")), key=lambda gpu: str(gpu[1]))
    return {(id_ if device is None else device): str(name) for device, id_, name in gpus}


def gpu_names(db: Database, devices: Iterable[int]) -> tuple[str, ...]:
    """GPU names of the CUDA ordinals that ran operations."""
    name_of_device = known_devices(db)
    if not name_of_device:
        return ()
    distinct_names = sorted(set(name_of_device.values()))
    return tuple(
        name_of_device.get(int(device), distinct_names[0] if len(distinct_names) == 1 else "GPU of unknown name")
        for device in devices
    )
