"""Text report of timed stages by rank: a table, the verdict, and a timeline."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.plots.plots import PALETTE, canvas, legend_above
from nvprof_kit._report.text.table import Bar, Column, Grid, below
from nvprof_kit._report.text.texts import Milliseconds, cell, is_missing, percent
from nvprof_kit._result.formats import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.timers import Timers, Verdict

MOST_BARS = 20_000
"""Maximum number of calls in the timeline; the first are drawn, and the title says so."""


def timers_report(result: Timers) -> list[RenderableType]:
    """The report: what was read, the table, the verdict, and warnings."""
    rows = result.select.of(result.rows).to_dict("records")
    clock = "cuda" if result.rows["cuda_total_ns"].notna().all() else "cpu"
    ms = Milliseconds.for_total(max(int(row[f"{clock}_max_ns"]) for row in rows))
    ranks = {"mean": 0, "max": 0, "min": 2}
    column = partial(Column.of, result.columns["timers"])
    columns = {"stage": column("stage", "left"), "rank": column("rank", is_optional=True), "calls": column("calls")}
    times = ("mean", "median", "p95", "min", "max")
    columns |= {f"{clock}_{name}_ns": column(f"{clock}_{name}_ns", rank=ranks.get(name, 1)) for name in times}
    columns |= {"bar": Column("", "bar"), "CPU": Column("CPU", rank=2)}
    columns |= {name: column(name) for name in ("skew_ns", "slowest")} if len(result.ranks) > 1 else {}
    grid = Grid(columns, result.select)
    longest = max(int(row[f"{clock}_total_ns"]) for row in rows) or 1
    for row in rows:
        total_ns = int(row[f"{clock}_total_ns"])
        cells: dict[str, str | Bar] = {
            str(name): ms(int(value)) if str(name).endswith("_ns") and not is_missing(value) else cell(str(name), value)
            for name, value in row.items()
        }
        grid.add({**cells, "CPU": cells["cpu_mean_ns"], "bar": Bar(total_ns / longest)}, cost=float(total_ns))
    clock_name = "GPU time by CUDA events" if clock == "cuda" else "time on the CPU clock"
    note = f"Milliseconds of {clock_name}, bars the sum over all calls; CPU is the mean on the CPU clock."
    if len(result.ranks) > 1:
        note += " skew is the mean of longest less shortest among the ranks."
    return [*_header(result), "", grid, "", *below((note,), result.warnings)]


def verdict_line(verdict: Verdict) -> Text:
    """The verdict in one line."""
    style = {"critical": "bold red", "warning": "yellow"}.get(verdict.severity, "")
    return Text(f"Straggler: {verdict.severity}. {verdict.reason[:1].upper()}{verdict.reason[1:]}", style)


def timeline_figure(result: Timers) -> Figure:
    """A lane for each rank with a bar for each call; nested stages are drawn thinner, on top."""
    calls = result.calls.nsmallest(MOST_BARS, "offset_ns")
    left_out = len(result.calls) - len(calls)
    title = f"Stages by rank{f' (the first {len(calls):,} of {len(result.calls):,})' if left_out else ''}"
    about = "ms since the first start, each rank by its own clock"
    figure, axes = canvas((12, 2.0 + 0.5 * len(result.ranks)), title, about, grid="x")
    lanes = {rank: lane for lane, rank in enumerate(result.ranks)}
    depth: Any
    rank: Any
    for number, (stage, stage_calls) in enumerate(calls.groupby("stage", observed=True)):
        for depth, at_depth in stage_calls.groupby("depth"):
            height = max(0.8 - 0.18 * int(depth), 0.2)
            for rank, bars in at_depth.groupby("rank"):
                spans = list(zip(bars["offset_ns"] / 1e6, bars["cpu_ns"] / 1e6, strict=True))
                y_span = (lanes[rank] - height / 2, height)
                axes.broken_barh(spans, y_span, color=PALETTE[number % len(PALETTE)], zorder=2 + int(depth))
        axes.bar(0, 0, color=PALETTE[number % len(PALETTE)], label=str(stage))
    axes.set_yticks(list(lanes.values()), [f"rank {rank}" for rank in lanes], fontsize=12)
    axes.invert_yaxis()
    legend_above(axes, 8)
    figure.supxlabel(textwrap.fill(verdict_line(result.verdict).plain, 120), fontsize=11)
    return figure


def _header(result: Timers) -> list[RenderableType]:
    ranks, verdict = len(result.ranks), result.verdict
    wall = Milliseconds.for_total(result.wall_ns).with_unit(result.wall_ns)
    about = f" · {ranks} rank{'s' * (ranks != 1)} · {len(result.calls):,} calls in {wall}"
    lines: list[RenderableType] = [Text(title(result.path), "bold").append(about, "not bold"), verdict_line(verdict)]
    if verdict.severity in ("warning", "critical"):
        gap = Milliseconds.for_total(verdict.gap_ns).with_unit(verdict.gap_ns)
        lines.append(Text(f"It costs {gap} a step, {percent(verdict.score)} of it"))
    return lines
