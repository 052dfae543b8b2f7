"""Time and memory of every layer in every step, and of every kind of block; the result of `LayerProfiler`.

Times are those of `nvprof_kit._analysis.layers.layers`, and a layer includes its submodules by model structure, not by
nesting in time, so that a phase of a block never includes another phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.attribution.steps import WHOLE_CAPTURE
from nvprof_kit._analysis.layers.layers import LAYER_PHASES, Layers, layers
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

ATTENTION = "attention"

MEMORY_COLUMNS: Columns = {
    "allocated_bytes": Column(
        "bytes allocated at the end of its last call in the step; memory columns need CUDA", "bytes"
    ),
    "retained_bytes": Column("bytes that its calls left allocated, summed; negative if they freed", "bytes"),
    "transient_bytes": Column("maximum of the bytes that a call needed temporarily in addition", "bytes"),
    "peak_bytes": Column("maximum of the allocated bytes while it ran", "bytes"),
    "reserved_bytes": Column("maximum of the bytes reserved from CUDA at the end of a call", "bytes"),
}
"""Memory columns, from the allocator's statistics at each begin and end of a layer."""

COLUMNS: Columns = {
    "step": Column("step number, missing outside steps"),
    "instance": Column("index of the step instance in time, from 0 (step numbers can repeat); missing outside steps"),
    "layer": Column("module path, or `(none)` for work outside every layer", kind="str"),
    "phase": Column("`forward`, `backward`, `recompute`; outside layers the phase of the loop, or `other`", kind="str"),
    "kind": Column("kind of block; missing for other modules", kind="str"),
    "calls": Column("number of calls"),
    "gpu_ops": Column("its own GPU operations, without those of nested layers"),
    "gpu_self_ns": Column("their GPU time in ns; without a GPU, the time of its CPU operators", "ns"),
    "gpu_ns": Column("GPU time including nested layers, in ns", "ns"),
    "attention_ns": Column("the part of `gpu_ns` in fused attention kernels, in ns", "ns"),
    "cpu_ns": Column("wall time on the CPU inside its ranges, in ns", "ns"),
    **MEMORY_COLUMNS,
}
"""The columns of `LayerProfile.rows`."""

KIND_COLUMNS: Columns = {
    "kind": Column(
        "kind of block, or the fused attention that ran: `flash attention`, `cuDNN attention`, …", kind="str"
    ),
    "is_block": Column("True for a kind of block, False for a kind of attention", kind="bool"),
    "layers": Column("number of blocks of this kind, or of layers in which the attention ran"),
    "count": Column("number of forward calls of the blocks, or of attention kernels"),
    **{
        f"{phase}_ns": Column(f"GPU time in {phase}, summed over blocks and steps, in ns", "ns")
        for phase in LAYER_PHASES
    },
    "gpu_ns": Column("sum of the three", "ns"),
    "attention_ns": Column("the part of `gpu_ns` in fused attention kernels, in ns", "ns"),
    "cpu_ns": Column("wall time on the CPU inside the blocks' ranges, in ns; missing for attention", "ns"),
    "mean_ns": Column(
        "GPU time of one block (or of attention in one layer) in one step, mean over blocks and steps, in ns", "ns"
    ),
    "min_ns": Column("minimum", "ns"),
    "max_ns": Column("maximum", "ns"),
    "retained_bytes": Column(
        "bytes that the forward of a block leaves allocated, mean over blocks and steps; missing without CUDA", "bytes"
    ),
}
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
    all_steps = layers(operations, steps=WHOLE_CAPTURE, by_step=True)
    of_steps = all_steps.rows[all_steps.rows["instance"].notna()]
    numbers = dict(sorted(zip(of_steps["instance"].astype(int), of_steps["step"].astype(int), strict=True)))
    attention = _fused_attention(operations)
    rows = _rows(all_steps, attention, numbers)
    rows.insert(4, "kind", rows["layer"].map(dict(kinds)).astype(object))
    rows = _with_memory(rows, memory, numbers)
    return LayerProfile(
        rows=rows[list(COLUMNS)],
        kinds=_kinds(rows, attention),
        shown_kinds=_kinds(_shown(rows, result), _shown(attention, result)),
        layers=result,
        busy=result.summary.busy_share if trace.info.on_gpu and result.summary.steps else None,
    )


def _shown(table: pd.DataFrame, result: Layers) -> pd.DataFrame:
    """The rows of a table with ``instance`` that are of the steps of `Layers.tree`; all rows without steps."""
    is_shown = result.steps.shown
    if not len(is_shown):
        return table
    instance = table["instance"].fillna(-1).to_numpy(dtype=np.int64)
    chosen: pd.DataFrame = table[np.append(is_shown, False)[instance]]
    return chosen


def _rows(result: Layers, attention: pd.DataFrame, numbers: Mapping[int, int]) -> pd.DataFrame:
    """The nonempty rows by step, with the columns of `COLUMNS` except kind and memory."""
    import pandas as pd

    model = result.tree[result.tree["layer"] != NO_LAYER]
    tree = ModelTree.of_rows([*model["layer"], NO_LAYER], [*model["parent"], ""])
    phases = dict.fromkeys([*LAYER_PHASES, *result.rows["phase"]])
    grid = pd.MultiIndex.from_product([[*numbers, -1], tree.layers, phases], names=["instance", "layer", "phase"])

    def sums(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
        keyed = table.assign(
            instance=table["instance"].fillna(-1), **{k: table[k].astype(object) for k in grid.names[1:]}
        )
        summed: pd.DataFrame = keyed.groupby(grid.names)[columns].sum().reindex(grid, fill_value=0)
        return summed

    def with_nested(values: pd.Series[int]) -> Int64Array:
        by_layer = values.to_numpy(dtype=np.int64).reshape(len(numbers) + 1, len(tree.layers), -1).swapaxes(0, 1)
        nested: Int64Array = tree.with_nested(by_layer).swapaxes(0, 1).ravel()
        return nested

    table = sums(result.rows, ["calls", "gpu_ops", "gpu_self_ns", "cpu_ns"])
    table.insert(3, "gpu_ns", with_nested(table["gpu_self_ns"]))
    table.insert(4, "attention_ns", with_nested(sums(attention, ["ns"])["ns"]))
    rows: pd.DataFrame = table[(table != 0).any(axis=1)].reset_index()
    rows["instance"] = rows["instance"].astype("Int64").mask(rows["instance"] < 0)
    rows.insert(0, "step", rows["instance"].map(dict(numbers)).astype("Int64"))
    return rows


def _fused_attention(operations: Operations) -> pd.DataFrame:
    """The fused attention kernels: kind, layer, phase, step (missing outside steps), count and ns of each."""
    import pandas as pd

    classes, attribution, ops = operations.classes, operations.attribution, operations.trace.ops
    chosen = np.flatnonzero(classes.is_a(ATTENTION))
    layer, phase = (column[chosen] for column in op_owners(attribution))
    instances = pd.array([*range(len(attribution.ranges.steps)), None], dtype="Int64")
    kernels = pd.DataFrame(
        {
            "kind": classes.family[chosen],
            "layer": layer,
            "phase": phase,
            "instance": instances[attribution.step[chosen]],  # NONE indexes the last entry
            "ns": (ops["end_ns"] - ops["start_ns"]).to_numpy()[chosen],
        }
    )
    by = ["kind", "layer", "phase", "instance"]
    summed = kernels.groupby(by, observed=True, dropna=False)["ns"].agg(count="count", ns="sum").reset_index()
    table: pd.DataFrame = summed.assign(kind=[classes.families[code].name for code in summed["kind"]])
    return table


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
    typed: pd.DataFrame = joined.astype(dict.fromkeys(MEMORY_COLUMNS, "Int64"))
    return typed


def _kinds(rows: pd.DataFrame, attention: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

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
    typed: pd.DataFrame = kinds.astype({"cpu_ns": "Int64", "retained_bytes": "Int64"})
    return typed
