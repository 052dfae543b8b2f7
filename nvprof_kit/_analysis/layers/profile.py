"""Time and memory of every layer in every step, and of every kind of block; the result of `LayerProfiler`.

Times are those of `nvprof_kit._analysis.layers.layers`, and a layer includes its submodules by model structure, not by
nesting in time, so that a phase of a block never includes another phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import NONE
from nvprof_kit._analysis.attribution.steps import WHOLE_CAPTURE, choose_steps
from nvprof_kit._analysis.layers.layers import Layers, layers
from nvprof_kit._analysis.layers.sums import SPLITS, Cells, sum_layers
from nvprof_kit._result.column import read_columns
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import LAYER_PHASES

ATTENTION = "attention"

MEMORY_COLUMNS = read_columns("nvprof_kit._analysis.layers", "profile-memory")
"""Memory columns, from the allocator's statistics at each begin and end of a layer."""

COLUMNS = read_columns("nvprof_kit._analysis.layers", "profile") | MEMORY_COLUMNS
"""The columns of `LayerProfile.rows`."""

KIND_COLUMNS = read_columns("nvprof_kit._analysis.layers", "profile-kinds")
"""The columns of `LayerProfile.kinds`."""


@dataclass(frozen=True)
class LayerProfile:
    """The profile of one recorded window of steps.

    Attributes:
        rows: The columns of `COLUMNS`; one row per step, layer and phase, in model order.
        kinds: The columns of `KIND_COLUMNS`; one row per kind of block, then one per kind of attention.
        shown_kinds: The same over the steps that per-step figures include, which are all but warm-up.
        layers: The per-layer table by step, as from `nvprof-kit layers --by step`.
        busy: Share of the steps' duration in which the GPU was busy; None without steps or a GPU.
    """

    rows: pd.DataFrame
    kinds: pd.DataFrame
    shown_kinds: pd.DataFrame
    layers: Layers
    busy: float | None

    @property
    def shown_rows(self) -> pd.DataFrame:
        """The rows of the steps that per-step figures include; all rows without steps."""
        return _shown(self.rows, self.layers)


def layer_profile(trace: Trace, kinds: Mapping[str, str], memory: pd.DataFrame | None = None) -> LayerProfile:
    """Time and memory by step, layer and phase, and by kind of block.

    Args:
        trace: The recorded window, with the operations' names.
        kinds: The kind of each block, by path.
        memory: One row per completed layer call: step, layer, phase and `MEMORY_COLUMNS`; None without CUDA.
    """
    operations = Operations(trace)
    result = layers(operations, by_step=True)
    rows = _rows(operations)
    rows.insert(4, "kind", rows["layer"].map(dict(kinds)).astype(object))
    rows = _with_memory(rows, memory, dict(enumerate(operations.attribution.ranges.steps.tolist())))
    # the fused attention kernels of each kind, layer, phase and step (missing outside steps)
    classes, attribution = operations.classes, operations.attribution
    chosen = np.flatnonzero(classes.is_a(ATTENTION))
    layer, phase = (column[chosen] for column in attribution.owners)
    instances = pd.array([*range(len(attribution.ranges.steps)), None], dtype="Int64")
    columns = {
        "kind": classes.family[chosen],
        "layer": layer,
        "phase": phase,
        "instance": instances[attribution.step[chosen]],  # NONE indexes the last entry
        "ns": (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[chosen],
    }
    by = ["kind", "layer", "phase", "instance"]
    times = pd.DataFrame(columns).groupby(by, observed=True, dropna=False)["ns"]
    attention = times.agg(count="count", ns="sum").reset_index()
    attention["kind"] = [classes.families[code].name for code in attention["kind"]]
    return LayerProfile(
        rows=rows[list(COLUMNS)],
        kinds=_kinds(rows, attention),
        shown_kinds=_kinds(_shown(rows, result), _shown(attention, result)),
        layers=result,
        busy=result.summary.busy_share if trace.info.on_gpu and result.summary.steps else None,
    )


def _shown(table: pd.DataFrame, result: Layers) -> pd.DataFrame:
    """The rows of a table with ``instance`` that are of the steps of `Layers.tree`; all rows without steps."""
    instance = table["instance"].fillna(NONE).to_numpy(dtype=np.int64)
    chosen: pd.DataFrame = table[np.append(result.steps.shown, result.steps.is_whole)[instance]]
    return chosen


def _rows(operations: Operations) -> pd.DataFrame:
    """The nonempty rows of all steps, with the columns of `COLUMNS` except kind and memory."""
    ranges = operations.attribution.ranges
    cells = Cells.of(ranges, choose_steps(operations.trace, operations.attribution, WHOLE_CAPTURE), by_step=True)
    sums, *_ = sum_layers(operations, cells, splits=("class",))
    attention = sums.get(f"{SPLITS['class']}{ATTENTION}_ns")
    columns = {
        **{name: sums[name] for name in ("calls", "gpu_ops", "gpu_self_ns")},
        "gpu_ns": sums["gpu_total_ns"],
        "attention_ns": np.zeros(cells.shape, dtype=np.int64) if attention is None else cells.with_nested(attention),
        "cpu_ns": sums["cpu_ns"],
    }
    return cells.frame(columns, np.any([*columns.values()], axis=0), ranges.steps)


def _with_memory(rows: pd.DataFrame, memory: pd.DataFrame | None, numbers: Mapping[int, int]) -> pd.DataFrame:
    """Add the memory of each row's calls.

    Args:
        rows: The rows.
        memory: One row per completed layer call, in time order.
        numbers: The step number of each instance.
    """
    how = {name: "max" for name in MEMORY_COLUMNS} | {"allocated_bytes": "last", "retained_bytes": "sum"}
    keys = ["instance", "layer", "phase"]
    if memory is None or not len(memory):
        joined = rows.assign(**dict.fromkeys(MEMORY_COLUMNS))
    else:
        # numbers can repeat: each run of one is an instance; if that is not what was recorded, the first of the number
        step = memory["step"]
        runs = (step != step.shift()).cumsum() - 1
        in_turn = step[runs.diff().fillna(1) > 0].tolist() == list(numbers.values())
        first = {number: instance for instance, number in reversed(list(numbers.items()))}
        instance = runs.map(dict(enumerate(numbers))) if in_turn else step.map(first)
        memory = memory.assign(instance=instance.astype("Int64")).drop(columns="step")
        joined = rows.merge(memory.groupby(keys, sort=False, dropna=False).agg(how).reset_index(), on=keys, how="left")
    return joined.astype(dict.fromkeys(MEMORY_COLUMNS, "Int64"))


def _kinds(rows: pd.DataFrame, attention: pd.DataFrame) -> pd.DataFrame:
    blocks = rows[rows["kind"].notna()]
    records = []
    for column, table in (("gpu_ns", blocks), ("ns", attention)):
        for kind, of_kind in table.groupby("kind", sort=False):
            by_phase = of_kind.groupby("phase", observed=True)[column].sum()
            each = of_kind.groupby(["instance", "layer"], observed=True, dropna=False)[column].sum()
            record: dict[str, Any] = {
                "kind": str(kind),
                "is_block": table is blocks,
                "layers": of_kind["layer"].nunique(),
                **{f"{phase}_ns": int(by_phase.get(phase, 0)) for phase in LAYER_PHASES},
                "gpu_ns": int(each.sum()),
                "mean_ns": round(each.mean()),
                "min_ns": int(each.min()),
                "max_ns": int(each.max()),
            }
            if table is blocks:
                forward = of_kind[of_kind["phase"] == LAYER_PHASES[0]]
                left = forward["retained_bytes"].dropna()
                record["count"] = int(forward["calls"].sum())
                record["retained_bytes"] = int(left.mean()) if len(left) else None
                record |= {name: int(of_kind[name].sum()) for name in ("attention_ns", "cpu_ns")}
            else:
                record |= {"count": int(of_kind["count"].sum()), "attention_ns": record["gpu_ns"]}
            records.append(record)
    kinds = pd.DataFrame(records, columns=list(KIND_COLUMNS))
    return kinds.astype({"cpu_ns": "Int64", "retained_bytes": "Int64"})
