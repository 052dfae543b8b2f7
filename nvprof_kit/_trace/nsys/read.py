"""Read an nsys export of any schema (2021 to 2026) as a `Trace`.

Tables and columns are probed, never assumed: exporters omit empty tables, and rename and insert columns between
versions. Worker threads read the two large tables of an SQLite file during the import of pandas, which takes a third of
the total time. Of a folder they would take more of the processor and no less time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit._trace.frames import make_frame
from nvprof_kit._trace.joins import few
from nvprof_kit._trace.nsys.calls import (
    fetch_calls,
    fetch_launches,
    launches_of,
    read_calls,
    read_loads,
    with_missed_launches,
)
from nvprof_kit._trace.nsys.nccl import read_collectives
from nvprof_kit._trace.nsys.nvtx import Nvtx, close_open_ranges, marks_of, ranges_of, read_nvtx
from nvprof_kit._trace.nsys.ops import named_ops, op_tables, read_graph_nodes, read_ops
from nvprof_kit._trace.nsys.optional import read_allocations, read_samples, read_scheduled
from nvprof_kit._trace.nsys.sources import (
    KERNEL,
    RUNTIME,
    Columns,
    check_columns,
    check_enums,
    check_rows,
    export_facts,
    node_table,
    warn_of_descriptions,
)
from nvprof_kit._trace.nsys.warnings import capture_warnings, losses_of
from nvprof_kit._trace.reader import DEFAULT, Request, named_domains
from nvprof_kit._trace.schema import BUSY_CALLS, FRAMES, OPS, SHAPES, SOUGHT, CaptureInfo, Losses, Trace
from nvprof_kit._trace.validate import DAY_NS, repeated
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues
from nvprof_kit.names import DOMAIN

LIBRARY = re.compile(
    r"^(nccl|nvshmem|cublas|cudnn|cufft|cusparse|cusolver|cutlass|cccl|thrust|nvtx|ucx|ucp|openmp|mpi)", re.I
)
"""The names of libraries' NVTX domains, whose ranges are no layers."""


def read_nsys(db: Database, request: Request) -> Trace:
    """Read an nsys export; a capture without GPU operations has an empty table of them if the request allows it.

    Raises:
        CaptureError: The file is not an nsys export, is damaged, or has no ranges of the domain or no operations.
    """
    domain, optional = request.domain, {*request.optional}
    written_by_nsys = {"META_DATA_EXPORT", "EXPORT_META_DATA", "NVTX_EVENTS", RUNTIME}
    if "StringIds" not in db.tables or written_by_nsys.isdisjoint(db.tables):
        raise CaptureError.of("no-export", path=db.named, kind=db.kind, export_type=db.export_type)
    check_columns(db, optional)
    check_rows(db, "StringIds")
    check_enums(db)
    warn_of_descriptions(db)
    reason = "" if op_tables(db) else Issue.of("no-gpu:calls-only" if RUNTIME in db.tables else "no-gpu:no-cuda")
    if reason and not request.cpu_only:
        raise CaptureError(f"{db.named}: {reason}")
    timed, busy = "duration_ns" in optional, BUSY_CALLS in optional
    with ThreadPoolExecutor(max_workers=2) as pool:
        later: Any = (lambda *call: pool.submit(*call).result) if db.in_threads else partial
        # the calls include the launches: they are read only once
        fetched_calls = later(fetch_calls, db, busy) if "calls" in optional else later(fetch_launches, db, timed)
        nvtx = read_nvtx(db)
        is_found_later = domain == DOMAIN and not nvtx.has_ranges(domain)
        if is_found_later:  # nothing of ours: what other programs name, or nothing
            domain = ",".join([DEFAULT, *(name for name in nvtx.domain_names if name and not LIBRARY.search(name))])
            optional |= {"name"}
        else:
            _check_has_domain(db, nvtx, domain)
        raw_ops = later(read_ops, db, optional)
        # import while the threads read; not in the threads, as an interrupted import may keep its lock
        import pandas  # noqa: F401

        ranges = ranges_of(db, nvtx, domain)
        nodes = read_graph_nodes(db)
        ops = named_ops(db, raw_ops(), optional)
        fetched = fetched_calls()
    losses = losses_of(db, fetched["api"], ops)
    api = launches_of(db, fetched, timed)
    tables = _optional_tables(db, domain, optional, nvtx, fetched)
    close_open_ranges(db, ranges, ops)
    _check_joins(db, ranges, ops, nodes, has_categories=nvtx.has_categories(domain))
    trace = Trace(
        info=_info(
            db, nvtx, domain, ranges, ops, losses=losses, reason=reason, evidence=SOUGHT if is_found_later else ""
        ),
        ranges=make_frame("ranges", ranges),
        api=make_frame("api", api),
        ops=make_frame("ops", ops),
        graph_nodes=make_frame("graph_nodes", nodes),
        **tables,
    )
    return with_missed_launches(db, trace)


def read_more(db: Database, trace: Trace, request: Request) -> Trace:
    """Add optional columns and tables to a capture without another read of existing ones.

    Args:
        db: The export.
        trace: The existing tables.
        request: The NVTX domain it was opened with, and the optional columns and tables to add.

    Raises:
        CaptureError: The file is damaged, or has changed since.
    """
    optional = request.optional
    check_columns(db, optional)
    new_tables = _optional_tables(db, request.domain, optional)
    if columns := [name for name, column in OPS.items() if column.optional and name in optional]:
        ops = make_frame("ops", named_ops(db, read_ops(db, columns), columns))
        if len(ops) != len(trace.ops):
            raise CaptureError(f"{db.named}: the file was changed since it was opened; open it again")
        new_tables["ops"] = trace.ops.assign(**{name: ops[name] for name in columns if name in ops})
    if "duration_ns" in optional:
        api = make_frame("api", launches_of(db, fetch_launches(db, timed=True), timed=True))
        new_tables["api"] = with_missed_launches(db, replace(trace, api=api)).api
    more = [warning for warning in db.warnings if warning not in trace.info.warnings]
    return replace(trace, info=replace(trace.info, warnings=(*trace.info.warnings, *more)), **new_tables)


def _optional_tables(
    db: Database, domain: str, optional: Collection[str], nvtx: Nvtx | None = None, fetched: Columns | None = None
) -> dict[str, Any]:
    """The requested optional tables, by name; NVTX events and calls are read unless they are given."""
    all_calls = fetched["api"] if fetched and "calls" in optional and BUSY_CALLS not in optional else None
    readers: dict[str, Callable[[], Columns]] = {
        "loads": lambda: read_loads(db, all_calls),  # before `calls` empties them
        "calls": lambda: read_calls(
            db, fetched or fetch_calls(db), None if BUSY_CALLS in optional else nvtx or read_nvtx(db)
        ),
        "samples": lambda: read_samples(db),
        "marks": lambda: marks_of(db, nvtx or read_nvtx(db), domain),
        "allocations": lambda: read_allocations(db),
        "collectives": lambda: read_collectives(db, nvtx or read_nvtx(db)),
        "scheduled": lambda: read_scheduled(db),
        # nsys records neither operator arguments nor Python calls
        "shapes": lambda: dict.fromkeys(SHAPES, ()),
        "frames": lambda: dict.fromkeys(FRAMES, ()),
    }
    return {name: make_frame(name, read()) for name, read in readers.items() if name in optional}


def _check_has_domain(db: Database, nvtx: Nvtx, domain: str) -> None:
    if "NVTX_EVENTS" not in db.tables:
        raise CaptureError.of("no-ranges", path=db.named)
    if not {"", *nvtx.domain_names} & {*named_domains(domain, nvtx.domain_names)}:
        domains = ", ".join(nvtx.domain_names) or "only the default domain"
        raise CaptureError.of("no-ranges:domain", path=db.named, domain=domain, domains=domains)
    if not nvtx.has_ranges(domain):
        raise CaptureError.of("no-ranges:window", path=db.named, domain=domain or "default")


def _check_joins(db: Database, ranges: Columns, ops: Columns, nodes: Columns, *, has_categories: bool) -> None:
    """Add warnings about values that the rest of the file contradicts."""
    count, open_count = len(ranges["start_ns"]), int(ranges["left_open"].sum())
    if open_count * 2 > count:
        db.warn("rows:no-end", open_count=open_count, count=count)
    if nameless := int(np.count_nonzero(ranges["text"] == "")):
        db.warn("rows:no-text", nameless=nameless, count=count)
    if has_categories and set(ranges["category"].categories) <= {""}:
        db.warn("rows:no-category")
    of_graph, correlated = ops["graph_node"] >= 0, ops["correlation"] >= 0
    if len(nodes["node"]) and not of_graph.any() and repeated(ops["correlation"][correlated], ops["pid"][correlated]):
        db.warn("rows:no-graph-node", table=KERNEL)
    elif len(nodes["node"]) and of_graph.any():
        replayed = ops["correlation"][of_graph]
        if lost_rows := int(np.isin(ops["correlation"][correlated & ~of_graph], replayed).sum()):
            db.warn("rows:some-graph-nodes", lost_rows=lost_rows)
        if (nodes["original"] < 0).all():
            db.warn("rows:no-original-node", table=node_table(db))
    gpus = _gpus(db)
    if unlisted := [device for device in few(ops["device"]).tolist() if gpus and device not in gpus]:
        rows = int(np.isin(ops["device"], unlisted).sum())
        db.warn("rows:unlisted-device", rows=rows, device=unlisted[0])


def _gpus(db: Database) -> dict[int, str]:
    """GPU names by CUDA ordinal; empty if the capture does not list its GPUs."""
    if not db.has("TARGET_INFO_GPU", "name", "id"):
        return {}
    ordinal = "cuDevice" if db.has("TARGET_INFO_GPU", "cuDevice") else "id"
    gpus = sorted(db.rows("TARGET_INFO_GPU", (ordinal, "id", "name")), key=lambda gpu: str(gpu[1]))
    return {(id_ if device is None else device): str(name) for device, id_, name in gpus}


def _info(
    db: Database, nvtx: Nvtx, domain: str, ranges: Columns, ops: Columns, *, losses: Losses, reason: str, evidence: str
) -> CaptureInfo:
    facts, gpus, devices = export_facts(db), _gpus(db), few(ops["device"]).tolist()
    usual = next(iter(gpus.values())) if len({*gpus.values()}) == 1 else "GPU of unknown name"
    # the session's end on its clock, which starts with the program; its length if the end is a wall-clock time
    has_details = db.has("ANALYSIS_DETAILS", "duration", "stopTime")
    details = db.rows("ANALYSIS_DETAILS", ("duration", "stopTime")) if has_details else []
    lengths = [int(value) for row in details for value in row if str(value).isdecimal()]
    starts = db.ids_like("cu%ProfilerStart%") if db.has(RUNTIME, "nameId") else ()
    issues = as_issues("no-gpu", [reason]) if reason else capture_warnings(db, ops, losses)
    if handed_over := nvtx.handed_over(domain):
        issues = [*issues, Issue.of("handed-over", count=handed_over)]
    return CaptureInfo(
        path=str(db.named),
        tool=f"nsys {facts.get('EXPORT_PRODUCT_VERSION', '')}".strip(),
        schema=facts.get("EXPORT_SCHEMA_VERSION", ""),
        domain=domain,
        gpus=tuple(gpus.get(device, usual) for device in devices) if gpus else (),
        ordinals=tuple(devices),
        on_gpu=True,
        processes=len({*few(ranges["pid"]).tolist(), *few(ops["pid"]).tolist()}),
        session_ns=max((length for length in lengths if length < DAY_NS), default=0),
        own_window=bool(starts and db.rows(RUNTIME, ("nameId",), [Where("nameId", starts)], limit=1)),
        other_domains=tuple(sorted({*nvtx.domain_names} - {*named_domains(domain, nvtx.domain_names)})),
        no_ops_reason=reason,
        evidence=evidence,
        losses=losses,
        warnings=(*issues, *db.warnings),
    )
