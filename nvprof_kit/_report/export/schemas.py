"""JSON Schemas of the JSON answers, generated from the definitions of the tables' columns.

They are published in the package as `nvprof_kit/schemas/NAME.json`, written by `make docs`. Adding a column keeps the
version of a schema; removing a column, or changing its meaning or type, increments it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from nvprof_kit._analysis.advise import advise
from nvprof_kit._analysis.breakdown import breakdown, critical_path, launches, queue, transfers
from nvprof_kit._analysis.diff import diff, kernels
from nvprof_kit._analysis.flops import flops
from nvprof_kit._analysis.layers import layers, memory, split
from nvprof_kit._analysis.memory import memory as snapshots
from nvprof_kit._analysis.memory import steps as memory_steps
from nvprof_kit._analysis.metrics import COLUMNS as METRICS
from nvprof_kit._analysis.ncu import layers as ncu_layers
from nvprof_kit._analysis.ncu import plan as ncu_plan
from nvprof_kit._analysis.ranks import bubbles, clocks, parallel, replay
from nvprof_kit._analysis.ranks import layers as ranks_layers
from nvprof_kit._analysis.ranks.waits import waits
from nvprof_kit._analysis.timers import COLUMNS as TIMERS
from nvprof_kit._report.text.doctor import COLUMNS as DOCTOR

Columns = Mapping[str, str]

PREFIX = "nvprof-kit/"
"""Prefix of all schema names."""

VERSION = 1
"""Version of schemas that are not in `VERSIONS`."""

VERSIONS: Mapping[str, int] = MappingProxyType({})
"""Versions of the other schemas."""

ANY = "rows"
"""Schema of tables without a schema of their own."""

_STATISTICS: Columns = {
    "calls": "number of calls",
    **{
        f"{clock}_{name}_ns": f"{meaning}, in ns"
        for clock, of in (("cpu", "CPU time"), ("gpu", "GPU time"))
        for name, meaning in (
            ("total", f"{of}, sum over the calls"),
            ("avg", "mean over the calls"),
            ("max", "maximum"),
            ("min", "minimum"),
            ("p50", "median"),
            ("p95", "95th percentile"),
        )
    },
    "cpu_ratio": "`cpu_total_ns` divided by that of the capture",
    "gpu_ratio": "`gpu_total_ns` divided by that of the capture",
}
_BY_STEP: Columns = {name: layers.COLUMNS[name] for name in layers.BY_STEP}
_GPU: Columns = {
    "process": "index of the process in the capture; missing for a CPU used by several",
    "device": "device ordinal in the process; missing for a CPU",
    "wall_ns": "duration of the recording, in ns",
}

SUMMARIES: Mapping[str, Columns] = MappingProxyType(
    {
        "device": {**_BY_STEP, **_GPU, "name": "name of the GPU, or `CPU`",
                   "busy_ns": "time in which it was busy, in ns; "
                   "missing without context switches", "utilisation": "`busy_ns` over `wall_ns`; above 1 for "
                   "several threads on a CPU"},
        "overview": {**_BY_STEP, "event": "kind of activity; overlapping time counts once", **_STATISTICS},
        "model": {**_BY_STEP, "part": "part of the loop", "gpu_ops": "number of GPU operations", **_STATISTICS},
        "distributed": {**_BY_STEP, **_GPU, "compute_ns": "time in which it computed, in ns",
                        "comm_ns": "time in which it communicated, in ns", "overlap_ns": "time of both, in ns",
                        "exposed_comm_ns": "exposed communication, in ns",
                        "comm_ratio": "`comm_ns` over `wall_ns`", "overlap_ratio": "`overlap_ns` over `comm_ns`"},
        "operator": {**_BY_STEP, "operator": "name of the operator",
                     "kernel": "a kernel that it launched; '' for the operator itself",
                     **_STATISTICS},
        "kernel": {**_BY_STEP, "name": "name of the kernel",
                   "kernel_class": "its class", "family": "the rule that classified it",
                   **_STATISTICS},
        "memory": {**_BY_STEP, "copy": "direction of the copy, or memset", "memory": "host memory, '' if none",
                   **_STATISTICS, "bytes": "sum of their bytes", "gb_per_s": "10^9 bytes per second"},
        "user": {**_BY_STEP, "range": "text of the range", "category": "its category", **_STATISTICS},
    }
)  # fmt: skip
"""The columns of the views of ``summary``; each view has a subset."""

FOLD: Columns = {
    "folded_into": "the group of equal blocks that contains it, such as `model.layers.0-79`; "
    "'' if none (only with `--fold`)",
    "unlike": "how it differs from the other blocks of the group; '' if it does not (only with `--fold`)",
}
"""Columns that `--fold` adds to rows of layers."""

TABLES: Mapping[str, Columns] = MappingProxyType(
    {
        "layers": {**layers.COLUMNS, **memory.MEMORY, **FOLD},
        "breakdown-steps": breakdown.COLUMNS,
        "breakdown-idle": {**breakdown.IDLE_COLUMNS, **FOLD},
        "breakdown-communication": {**transfers.COMM_COLUMNS, **FOLD},
        "breakdown-copies": {**transfers.COPY_COLUMNS, **FOLD},
        "breakdown-launches": {**launches.LAUNCH_COLUMNS, **FOLD},
        "breakdown-queue": queue.QUEUE_TIME_COLUMNS,
        "breakdown-critical-path": {**critical_path.PATH_COLUMNS, **FOLD},
        **{f"summary-{view}": columns for view, columns in SUMMARIES.items()},
        "advise": advise.COLUMNS,
        "diff": {**diff.COLUMNS, **FOLD},
        "diff-kernels": kernels.KERNEL_COLUMNS,
        "flops": {**flops.COLUMNS, **FOLD},
        "metrics": {**METRICS, **FOLD},
        "ncu-plan": ncu_plan.COLUMNS,
        "ncu-layers": {**ncu_layers.COLUMNS, **FOLD},
        "ncu-kernels": {"layer": "module path, or `(none)`", "phase": "its phase"},
        "timers": TIMERS,
        "timers-calls": {"rank": "rank", "stage": "name of the stage", "call": "index of the call, from 0",
                         "cpu_ns": "CPU time, in ns", "cuda_ns": "GPU time between CUDA events, in ns; "
                         "missing if not measured", "depth": "number of enclosing stages"},
        "memory-layer": {**snapshots.HOLDERS, **FOLD},
        "memory-stack": {**snapshots.HOLDERS, "stack": "call stack of the allocation"},
        "memory-size": {**snapshots.HOLDERS, "size": "size class of the blocks"},
        "memory-allocation": {**memory_steps.TRAFFIC, **FOLD},
        "memory-step": memory_steps.STEPS,
        "memory-segment": memory_steps.SEGMENTS,
        "memory-leak": snapshots.LEAKS,
        "doctor": DOCTOR,
        "ranks-waits": waits.WAIT_COLUMNS,
        "ranks-charges": {**waits.CHARGE_COLUMNS, **FOLD},
        "ranks-layers": ranks_layers.COLUMNS,
        "ranks-clocks": clocks.COLUMNS,
        "ranks-groups": parallel.GROUP_COLUMNS,
        "ranks-bubbles": bubbles.BUBBLE_COLUMNS,
        "ranks-micro-batches": bubbles.MICRO_BATCH_COLUMNS,
        "ranks-critical-path": replay.PATH_COLUMNS,
        "ranks-what-if": replay.WHAT_IF_COLUMNS,
        ANY: {},
    }
)  # fmt: skip
"""The columns of each answer by schema name."""

_MORE: Mapping[str, Columns] = MappingProxyType({"layers": split.COLUMNS})
"""Columns with a NAME from the capture in their names."""

_OPEN = ("ncu-kernels", "timers-calls", ANY)
"""Tables with additional columns."""

_BOOLEANS = {"launch_bound", "enough"}
_TEXTS = {
    "layer", "phase", "cause", "call", "collective", "copy", "memory", "link", "rule", "title", "evidence", "advice",
    "level", "kernel_class", "verdict", "what", "name", "now", "dtype", "unknown", "note", "kernel", "grid", "block",
    "stall", "bound", "reason", "stage", "stack", "size", "kind", "pool", "event", "part", "operator", "family",
    "range", "category", "folded_into", "unlike", "subject", "check", "seen", "why", "fix", "through",
    "group", "parallel", "told_by", "kinds", "direction", "confidence", "refuted_by",
}  # fmt: skip
_WHOLE = {
    "step", "instance", "process", "device", "stream", "calls", "gpu_ops", "ops", "gaps", "short_ops", "blocking",
    "ranks", "rank", "queue_max", "registers", "launches", "blocks", "allocations", "steps", "address", "matched",
    "waiting_rank", "late_rank", "cause_rank", "slowest", "depth", "bytes",
    "micro_batch", "from_rank", "collectives",
}  # fmt: skip
_KINDS = {
    ("ranks-layers", "unlike"): "boolean",
    ("timers-calls", "call"): "integer",
    ("ranks-clocks", "through"): "integer",
    ("ranks-layers", "ops"): "number",
    ("ranks-groups", "size"): "integer",
    ("ranks-groups", "ranks"): "string",
    ("ranks-bubbles", "stage"): "integer",
    ("ranks-layers", "stage"): "integer",
    ("ranks-micro-batches", "stage"): "integer",
}
_WHOLE_UNITS = ("_ns", "_bytes")
_KEYS = ("layer", "phase")
_UNITS = {
    "_ns": "ns", "_bytes": "byte", "bytes": "byte", "ns": "ns", "_pct": "% of the peak", "gb_per_s": "10^9 byte/s",
    "tflops_per_s": "10^12 operations/s", "_ppm": "1e-6", "bytes_per_step": "byte",
}  # fmt: skip


def kind_of(table: str, column: str) -> str:
    """The JSON type of a column: ``integer``, ``number``, ``string`` or ``boolean``."""
    if (table, column) in _KINDS:
        return _KINDS[table, column]
    if column in _BOOLEANS:
        return "boolean"
    if column in _TEXTS:
        return "string"
    if table.startswith(("ncu-layers", "ranks-")) and column.endswith(_WHOLE_UNITS):
        return "number"
    return "integer" if column in _WHOLE or column.endswith(_WHOLE_UNITS) else "number"


def unit_of(column: str) -> str | None:
    """The unit in a column's name; None for counts, fractions and texts."""
    return next((unit for suffix, unit in _UNITS.items() if column.endswith(suffix)), None)


def name_of(table: str) -> str:
    """The schema name in an answer."""
    return PREFIX + table


def version_of(table: str) -> int:
    """Version of a schema."""
    return VERSIONS.get(table, VERSION)


def reasons(table: str, columns: Iterable[str]) -> dict[str, str]:
    """Why these columns have missing values, from their definitions."""
    return {column: _reason(TABLES.get(table, {}).get(column, ""), column) for column in columns}


def _reason(meaning: str, column: str) -> str:
    match = re.search(r"(?:missing|none|NaN) (?:for|if|where|outside|in|as|with|without)[^;.(]*", meaning)
    if match:
        return match.group().strip()
    if column in _BY_STEP:
        return "missing outside steps"
    return "the capture does not contain it, or it does not apply to the row"


def _property(table: str, column: str, meaning: str) -> dict[str, Any]:
    kind = kind_of(table, column)
    described: dict[str, Any] = {"type": kind if column in _KEYS else [kind, "null"], "description": meaning}
    unit = unit_of(column)
    return described | ({"unit": unit} if unit and kind in ("integer", "number") else {})


@cache
def schema(table: str) -> dict[str, Any]:
    """The JSON Schema of an answer with the rows of a table, or of ``ranks``."""
    made = _head(table)
    if table == "ranks":
        parts = {name.removeprefix("ranks-").replace("-", "_"): _rows(name) for name in TABLES if "ranks-" in name}
        facts = {
            name: {"type": ["number", "null"]} for name in ("replay_error", "total_wait_ns", "steps", "collectives")
        }
        verdict = {
            "type": "object",
            "description": "the late rank, where it loses time, and why",
            "required": ["rank", "sentence"],
        }
        cut = {"type": ["object", "null"], "additionalProperties": made["properties"]["truncated"]}
        made["properties"] |= {"verdict": verdict, **parts, **facts, "truncated": cut}
        made["required"] += ["verdict", *parts]
    else:
        made["properties"]["rows"] = _rows(table)
        made["required"].append("rows")
    return made


def _head(table: str) -> dict[str, Any]:
    name, version = name_of(table), version_of(table)
    texts = {"type": "array", "items": {"type": "string"}}
    reasons_of = {"type": "object", "additionalProperties": {"type": "string"}}
    left_out = {
        "type": ["object", "null"],
        "description": "what a limit left out; null if nothing",
        "required": ["rows_left_out", "rows", "bound", "kept"],
        "properties": {
            "rows_left_out": {"type": "integer"},
            "rows": {"type": "integer", "description": "number of rows without the limit"},
            "bound": {"enum": ["max_rows", "budget"]},
            "kept": {"type": "string", "description": "which rows were kept"},
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nvprof-kit:schema:{table}:{version}",
        "title": name,
        "type": "object",
        "required": ["schema", "version", "sources", "warnings", "unknown", "truncated"],
        "properties": {
            "schema": {"const": name},
            "version": {"const": version},
            "sources": {**texts, "description": "input files"},
            "warnings": {**texts, "description": "what may be missing or distorted, the most severe first"},
            "unknown": {**reasons_of, "description": "columns with null in some row, each with the reason"},
            "truncated": left_out,
        },
    }


def _rows(table: str) -> dict[str, Any]:
    columns = TABLES[table]
    more = _MORE.get(table, {})
    row: dict[str, Any] = {
        "type": "object",
        "properties": {
            "capture": {"type": "string", "description": "the file, with several captures"},
            **{name: _property(table, name, meaning) for name, meaning in columns.items()},
        },
        "additionalProperties": table in _OPEN,
    }
    if more:
        row["patternProperties"] = {
            f"^{name.replace('NAME', '.+')}$": _property(table, name, meaning) for name, meaning in more.items()
        }
    return {"type": "array", "items": row}


def published(table: str) -> dict[str, Any]:
    """The schema as published in the package."""
    text = (files("nvprof_kit") / "schemas" / f"{table}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def texts() -> dict[str, str]:
    """The contents of the schema files by name."""
    names = [*TABLES, "ranks"]
    return {f"{name}.json": json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n" for name in names}
