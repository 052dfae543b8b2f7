"""Text report of `LayerProfiler`: block kinds, layers by step, curves, memory by round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.plots.plots import PALETTE, canvas, legend_above
from nvprof_kit._report.text.layers import capitalized, header, steps_table, time_name, tree_table
from nvprof_kit._report.text.table import Column, Grid, below
from nvprof_kit._report.text.texts import Milliseconds, count_per_step, counted, is_missing, mib_cell
from nvprof_kit._result.result import UNFOLDED
from nvprof_kit.names import LAYER_PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.layers.profile import LayerProfile

_MIB = 1 << 20
_LABELS = 48
_KINDS = ("kind", "layers", "count", *LAYER_PHASES, "total", "attention", "mean", "min", "max", "CPU", "MiB left")


def profile_report(profile: LayerProfile, facts: list[str]) -> list[RenderableType]:
    """The report: facts about the run, block kinds, then each layer by phase and by step.

    Args:
        profile: The profile.
        facts: Lines above the tables: rank, overhead, utilization.
    """
    layers = replace(profile.layers, select=UNFOLDED)
    parts = [*header(layers), "", *tree_table(layers), *below((), layers.warnings), "", *steps_table(layers)]
    return [*profile_head(profile, facts), "", *parts]


def profile_head(profile: LayerProfile, facts: list[str]) -> list[RenderableType]:
    """The facts, and the kinds of blocks and attention."""
    lines: list[RenderableType] = [Text(fact) for fact in facts]
    if profile.busy is not None:
        lines.append(Text(f"GPU busy: {100 * profile.busy:.1f} % of the recorded steps"))
    lines.append("")
    if not len(profile.shown_kinds):
        nothing = "No block ran and no fused attention: what ran is in the table of all layers"
        return [*lines, Text(nothing, "dim")]
    steps, rows = max(profile.layers.summary.steps, 1), profile.shown_kinds.to_dict("records")
    per_step = Milliseconds.for_total(max(row["gpu_ns"] for row in rows), steps)
    of_one = Milliseconds.for_total(max(row["max_ns"] for row in rows))
    memory = any(not is_missing(row["retained_bytes"]) for row in rows)
    grid = Grid({name: Column(name, "left" if name == "kind" else "right", is_optional=True) for name in _KINDS})
    for row in rows:
        cells = {
            "kind": row["kind"],
            "layers": str(row["layers"]),
            "count": count_per_step(row["count"], steps),
            **{phase: per_step(row[f"{phase}_ns"]) for phase in LAYER_PHASES},
            "total": per_step(row["gpu_ns"]),
            "attention": per_step(row["attention_ns"]) if row["is_block"] else "",
            **{name: of_one(row[f"{name}_ns"]) for name in ("mean", "min", "max")},
            "CPU": "" if is_missing(row["cpu_ns"]) else per_step(row["cpu_ns"]),
            "MiB left": "" if is_missing(row["retained_bytes"]) else mib_cell(row["retained_bytes"]),
        }
        grid.add(cells, style="" if row["is_block"] else "dim")
    caption = f"Milliseconds per step of {time_name(profile.layers)}; mean, min and max are one layer's in one step."
    return [*lines, grid, "", Text(caption + (" MiB left: by one block's forward." if memory else ""), "dim")]


def time_figure(profile: LayerProfile) -> Figure:
    """Time per step of each block along the model: a curve per kind, attention dashed, a band from the fastest to the
    slowest step. Without blocks, a curve of the model's direct children.
    """
    blocks = curve_points(profile)
    gpus = f" on {counted(profile.layers.info.gpus)}" if profile.layers.info.gpus else ""
    title = f"{capitalized(time_name(profile.layers))} of each layer{gpus}, all phases"
    figure, axes = canvas((12, 5.5), title, y=f"{capitalized(time_name(profile.layers))} per step, ms", grid="y")
    for number, (kind, rows) in enumerate(blocks.groupby("kind", sort=False)):
        colour, times = PALETTE[number % (len(PALETTE) - 2)], rows.select_dtypes("number") / 1e6
        axes.fill_between(rows.index, times["min_ns"], times["max_ns"], color=colour, alpha=0.18, linewidth=0)
        axes.plot(rows.index, times["mean_ns"], color=colour, lw=2, marker="o", ms=4, label=str(kind))
        if rows["attention_ns"].any():
            label = f"{kind}: attention"
            axes.plot(rows.index, times["attention_ns"], color=colour, lw=1.5, ls="--", marker=".", label=label)
    labels = blocks["layer"].tolist()
    label_step = max(len(labels) // _LABELS, 1)
    axes.set_xticks(range(0, len(labels), label_step), labels[::label_step], rotation=90, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    if len(blocks):
        legend_above(axes)
    return figure


def curve_points(profile: LayerProfile) -> pd.DataFrame:
    """The points of the curves in model order: layer, kind, mean_ns, min_ns and max_ns over the steps, and
    attention_ns, also a mean.
    """
    rows = profile.shown_rows
    if rows["kind"].notna().any():
        chosen = rows[rows["kind"].notna()]
    else:
        tree = profile.layers.tree
        top = tree[(tree["depth"] == 1) if (tree["depth"] == 1).any() else (tree["layer"] != "(none)")]
        chosen = rows[rows["layer"].isin(top["layer"])].assign(kind="layers")
    by_step = chosen.groupby(["layer", "kind", "instance"], sort=False, dropna=False)[["gpu_ns", "attention_ns"]].sum()
    over = by_step.groupby(["layer", "kind"], sort=False)
    points: pd.DataFrame = over["gpu_ns"].agg(mean_ns="mean", min_ns="min", max_ns="max").reset_index()
    points["attention_ns"] = over["attention_ns"].mean().to_numpy()
    order = {layer: position for position, layer in enumerate(profile.layers.tree["layer"])}
    return points.sort_values("layer", key=lambda column: column.map(order), ignore_index=True)


def memory_lines(rows: pd.DataFrame) -> Iterator[str]:
    """The memory of each layer by round, in MiB."""
    measured = rows[rows["allocated_bytes"].notna()]
    names = ("allocated", "reserved", "peak", "retained", "transient")
    for (_, step), step_rows in measured.groupby(["instance", "step"], sort=True, dropna=False):
        yield "outside steps" if is_missing(step) else f"step {step}"
        for row in step_rows.to_dict("records"):
            sizes = (f"{name} {row[f'{name}_bytes'] / _MIB:.2f} MB" for name in names)
            yield f"  {row['layer']} {row['phase']}: {', '.join(sizes)}"
