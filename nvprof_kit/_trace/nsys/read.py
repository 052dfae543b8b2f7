"""Read an nsys SQLite export of any schema (2021 to 2026) as a `Trace`.

Tables and columns are probed, never assumed: exporters omit empty tables, and rename and insert columns between
versions. Worker threads read the two large tables during the import of pandas, which takes a third of the total time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from nvprof_kit._trace.files.database import Database, Where
from nvprof_kit._trace.frames import few, make_frame
from nvprof_kit._trace.nsys import tables
from nvprof_kit._trace.nsys.calls import busy_calls, count_among, fetch_calls, launches_of, read_calls, read_loads
from nvprof_kit._trace.nsys.nccl import read_collectives
from nvprof_kit._trace.nsys.ops import named_ops, op_tables, read_no_ops, read_ops
from nvprof_kit._trace.nsys.optional import read_allocations, read_marks, read_samples, read_scheduled
from nvprof_kit._trace.nsys.sources import (
    check_columns,
    check_enums,
    check_rows,
    node_table,
    tables_for,
    warn_of_descriptions,
)
from nvprof_kit._trace.nsys.warnings import capture_warnings, handed_over_warnings, launch_names
from nvprof_kit._trace.reader import DEFAULT, Request, named_domains
from nvprof_kit._trace.schema import BUSY_CALLS, FRAMES, OPS, SHAPES, SOUGHT, CaptureInfo, Trace
from nvprof_kit._trace.validate import DAY_NS, repeated
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues
from nvprof_kit.names import DOMAIN

_LIBRARY = re.compile(
    r"^(nccl|nvshmem|cublas|cudnn|cufft|cusparse|cusolver|cutlass|cccl|thrust|nvtx|ucx|ucp|openmp|mpi)", re.I
)
_EXPORT_METADATA = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_CALLS_ONLY = (
    "CUDA calls but no kernel, copy or memset in the collected window; include GPU work in the window (a later "
    "--delay, a longer --duration, cudaProfilerStop after a synchronize)"
)
_NO_CUDA = (
    "no GPU operations: CUDA was not traced, or nothing ran on a GPU; record with `nsys profile --trace=cuda,nvtx`"
)


def read_nsys(db: Database, request: Request) -> Trace:
    """Read an nsys export; a capture without GPU operations has an empty table of them if the request allows it.

    Raises:
        CaptureError: The file is not an nsys export, is damaged, or has no ranges of the domain or no operations.
    """
    domain, optional = request.domain, {*request.optional}
    if "StringIds" not in db.tables or not {*_EXPORT_METADATA, "NVTX_EVENTS", tables.RUNTIME} & {*db.tables}:
        raise CaptureError(
            f"{db.named}: {db.kind}, but not an nsys export (no StringIds table); needed the output of `nsys export "
            f"--type {db.export_type}`"
        )
    check_columns(db, tables_for(optional))
    check_rows(db, ("StringIds",))
    check_enums(db)
    warn_of_descriptions(db)
    reason = "" if op_tables(db) else _CALLS_ONLY if tables.RUNTIME in db.tables else _NO_CUDA
    if reason and not request.cpu_only:
        raise CaptureError(f"{db.named}: {reason}")
    domains = tables.nvtx_domains(db)
    others_ranges = domain == DOMAIN and not tables.has_ranges(db, domains, domain)
    if others_ranges:  # nothing of ours: what other programs name, or nothing
        domain = ",".join([DEFAULT, *sorted(name for name in domains.by_name if name and not _LIBRARY.search(name))])
        optional |= {"name"}
    else:
        _check_has_domain(db, domains, domain)
    only, lengths = busy_calls(db) if BUSY_CALLS in optional else (), "duration_ns" in optional
    with ThreadPoolExecutor(max_workers=2) as pool:
        ops_job = pool.submit(read_no_ops if reason else read_ops, db, optional)
        calls_job = pool.submit(fetch_calls, db, only) if "calls" in optional else None
        # the calls include the launches: read them only once
        launching = [] if reason else launch_names(db)
        api_job = None if calls_job else pool.submit(tables.read_and_count_launches, db, lengths, launching)
        # import while the threads read; not in the threads, as an interrupted import may keep its lock
        import pandas  # noqa: F401

        ranges = tables.read_ranges(db, domains, domain)
        nodes = tables.read_graph_nodes(db)
        ops = named_ops(db, ops_job.result(), optional)
        fetched = calls_job.result() if calls_job else {}
        if api_job:
            api, launches = api_job.result()
        else:
            api, launches = launches_of(db, fetched, lengths), count_among(fetched, launching)
        calls = read_calls(db, fetched, operators=not only) if calls_job else None
        api = tables.with_missed_launches(db, api, ops)
        if not others_ranges and not len(ranges["start_ns"]):
            raise CaptureError(
                f"{db.named}: the NVTX domain {domain or 'default'!r} has no ranges in this capture; include a step in "
                "the window, and with nvtx 0.2.12 or newer under nsys 2024.2 or older make the ranges with nvprof_kit"
            )
        tables.close_open_ranges(db, ranges, api, ops)
        _check_joins(db, ranges, ops, nodes, registered=tables.has_categories(domains, domain))
        devices = tables.known_devices(db)
        if strange := [device for device in few(ops["device"]).tolist() if devices and device not in devices]:
            rows = int(np.isin(ops["device"], strange).sum())
            db.warn(f"deviceId of {rows} operations is {strange[0]}, a GPU that TARGET_INFO_GPU does not list")
    more = _optional_tables(db, domain, {*optional} - {"calls"})
    other_domains = tuple(sorted({*domains.by_name} - {*named_domains(domain, domains.by_name)}))
    handed_over = handed_over_warnings(tables.handed_over(db, domains, domain))
    info = _info(
        db,
        domain,
        ranges,
        ops,
        launches,
        more_warnings=handed_over,
        other_domains=other_domains,
        reason=reason,
    )
    return Trace(
        info=replace(info, evidence=SOUGHT) if others_ranges else info,
        ranges=make_frame("ranges", ranges),
        api=make_frame("api", api),
        ops=make_frame("ops", ops),
        graph_nodes=make_frame("graph_nodes", nodes),
        calls=make_frame("calls", calls) if calls else None,
        **more,
    )


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
    check_columns(db, tables_for(optional))
    new_tables = _optional_tables(db, request.domain, optional)
    columns = [name for name, column in OPS.items() if column.optional and name in optional]
    if columns:
        read = read_no_ops if trace.info.lacks else read_ops
        ops = make_frame("ops", named_ops(db, read(db, columns), columns))
        if len(ops) != len(trace.ops):
            raise CaptureError(f"{db.named}: the file was changed since it was opened; open it again")
        new_tables["ops"] = trace.ops.assign(**{name: ops[name] for name in columns if name in ops})
    if "duration_ns" in optional:
        joined = {name: trace.ops[name].to_numpy() for name in ("pid", "correlation")}
        api = tables.with_missed_launches(db, tables.read_launches(db, timed=True), joined)
        new_tables["api"] = make_frame("api", api)
    more = [warning for warning in db.warnings if warning not in trace.info.warnings]
    return replace(trace, info=replace(trace.info, warnings=(*trace.info.warnings, *more)), **new_tables)


def _optional_tables(db: Database, domain: str, optional: Collection[str]) -> dict[str, Any]:
    """The requested optional tables, by name."""
    readers: dict[str, Callable[[], dict[str, Any]]] = {
        "calls": lambda: read_calls(db),
        "samples": lambda: read_samples(db),
        "marks": lambda: read_marks(db, tables.nvtx_domains(db), domain),
        "allocations": lambda: read_allocations(db),
        "collectives": lambda: read_collectives(db),
        "scheduled": lambda: read_scheduled(db),
        "loads": lambda: read_loads(db),
        # nsys records neither operator arguments nor Python calls
        "shapes": lambda: dict.fromkeys(SHAPES, ()),
        "frames": lambda: dict.fromkeys(FRAMES, ()),
    }
    return {name: make_frame(name, read()) for name, read in readers.items() if name in optional}


def _check_has_domain(db: Database, domains: tables.Domains, domain: str) -> None:
    if "NVTX_EVENTS" not in db.tables:
        raise CaptureError(
            f"{db.named}: no NVTX events: record with `nsys profile --trace=cuda,nvtx`, and call "
            "nvprof_kit.annotate_model(model) in the program"
        )
    if not domains.by_name:
        check_rows(db, ("NVTX_EVENTS",))
    if not {"", *domains.by_name} & {*named_domains(domain, domains.by_name)}:
        named_ones = ", ".join(sorted(domains.by_name)) or "only the default domain"
        raise CaptureError(
            f"{db.named}: no ranges of the NVTX domain {domain!r} (found: {named_ones}); "
            "call nvprof_kit.annotate_model(model) in the program, or name a domain with --domain, or --rules"
        )


def _check_joins(
    db: Database, ranges: dict[str, Any], ops: dict[str, Any], nodes: dict[str, Any], *, registered: bool
) -> None:
    """Add warnings about columns without values that the rest of the file implies."""
    count, open_count = len(ranges["start_ns"]), int(ranges["left_open"].sum())
    if open_count * 2 > count:
        db.warn(f"NVTX_EVENTS.end is missing in {open_count} of {count} ranges: they are taken to last until the "
                "capture's end")  # fmt: skip
    if nameless := int(np.count_nonzero(ranges["text"] == "")):
        db.warn(f"NVTX_EVENTS.text and textId give no text to {nameless} of {count} ranges")
    if registered and set(ranges["category"].categories) == {""}:
        db.warn("NVTX_EVENTS.category is missing in every range, though the program registered categories")
    if len(nodes["node"]):
        of_graph, is_correlated = ops["graph_node"] >= 0, ops["correlation"] >= 0
        if of_graph.any() and (
            lost_rows := int(np.isin(ops["correlation"][is_correlated & ~of_graph], ops["correlation"][of_graph]).sum())
        ):
            db.warn(f"graphNodeId of kernels, copies or memsets is NULL in {lost_rows} rows of replayed graphs")
        if not of_graph.any() and repeated(ops["correlation"][is_correlated], ops["pid"][is_correlated]):
            db.warn("CUPTI_ACTIVITY_KIND_KERNEL.graphNodeId is NULL in every row, though graphs were replayed")
        if of_graph.any() and (nodes["original"] < 0).all():
            db.warn(f"{node_table(db)}.originalGraphNodeId is NULL in every row: replayed kernels are counted for the "
                    "layer that launched the graph")  # fmt: skip


def _info(
    db: Database,
    domain: str,
    ranges: dict[str, Any],
    ops: dict[str, Any],
    launches: int,
    *,
    more_warnings: tuple[Issue, ...],
    other_domains: tuple[str, ...],
    reason: str,
) -> CaptureInfo:
    meta = next((table for table in _EXPORT_METADATA if db.has(table, "name", "value")), None)
    entries = {str(name): str(value) for name, value in db.rows(meta, ("name", "value"))} if meta else {}
    version = entries.get("EXPORT_PRODUCT_VERSION", "")
    devices = few(ops["device"])
    # the session's end on its clock, which starts with the program; its length if the end is a wall-clock time
    has_details = db.has("ANALYSIS_DETAILS", "duration", "stopTime")
    details = db.rows("ANALYSIS_DETAILS", ("duration", "stopTime")) if has_details else []
    lengths = [int(value) for row in details for value in row if str(value).isdecimal()]
    starts = db.ids_like("cu%ProfilerStart%") if db.has(tables.RUNTIME, "nameId") else ()
    return CaptureInfo(
        path=str(db.path),
        tool=f"nsys {version}".strip(),
        schema=entries.get("EXPORT_SCHEMA_VERSION", ""),
        domain=domain,
        gpus=tables.gpu_names(db, devices),
        ordinals=tuple(devices.tolist()),
        on_gpu=True,
        processes=len(np.unique(np.concatenate([few(ranges["pid"]), few(ops["pid"])]))),
        session_ns=max((length for length in lengths if length < DAY_NS), default=0),
        own_window=bool(starts and db.rows(tables.RUNTIME, ("nameId",), [Where("nameId", starts)], limit=1)),
        other_domains=other_domains,
        lacks=reason,
        warnings=(
            *(as_issues("no-gpu", [reason]) if reason else capture_warnings(db, ops, launches)),
            *more_warnings,
            *db.warnings,
        ),
    )
