"""The per-layer table as a person reads it: the model as an indented tree, forward and backward side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.text.terminal import Bar, capture_line, table, warning_lines
from nvprof_kit._report.text.units import Milliseconds, count_per_step, mib, percent, percents
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.layers import LayersResult, Summary

Row = dict[Any, Any]
"""One row of `nvprof_kit._analysis.layers.layers.LayersResult.tree`."""

_PHASES = tuple(category.value for category in LAYER_CATEGORIES)
_COLUMNS = ("layer", "calls", *_PHASES, "total", "comm", "share", "", "CPU")
MEMORY_COLUMNS = {"kept_bytes": "kept MiB", "peak_bytes": "peak MiB", "cuda_bytes": "CUDA MiB"}
"""Heads of the columns of `nvprof_kit._analysis.layers.memory.memory_tree`."""


@dataclass(frozen=True)
class LayersView:
    """How much of the model to show.

    Attributes:
        depth: Levels of the tree, None for all. A layer's figures hold its children's, so hiding these loses nothing.
    """

    depth: int | None = None

    def shows(self, row: Row) -> bool:
        """Whether a row of the tree is shown."""
        return self.depth is None or row["depth"] < self.depth


@dataclass(frozen=True)
class Line:
    """One line of the table: the data half of the report.

    Attributes:
        label: The layer below its parent, indented, or ``(none) optimizer``.
        calls: How often it ran, per step where there are steps.
        times: Milliseconds in forward, backward, recompute, '' for none.
        total: Milliseconds altogether.
        percent: Its part of the capture's total, as text.
        share: The same as a number, 0 to 1.
        cpu: Milliseconds its ranges were open on the CPU.
        comm: Milliseconds of the total in communication.
        outside: Whether it lies outside every layer.
        memory: MiB by the heads of `MEMORY_COLUMNS`, where memory was asked for.
    """

    label: str
    calls: str
    times: dict[str, str]
    total: str
    percent: str
    share: float = 0.0
    cpu: str = ""
    comm: str = ""
    outside: bool = False
    memory: Mapping[str, str] = field(default_factory=dict)


def layers_report(result: LayersResult, view: LayersView) -> list[RenderableType]:
    """The whole report: what the capture is, the table, and every warning about it."""
    lines = layers_lines(result, view)
    total = total_line(result)
    used = {"recompute": bool(total.times["recompute"]), "comm": bool(result.summary.comm_ns)}
    columns = [name for name in _COLUMNS if used.get(name, True)]
    columns += [name for name in MEMORY_COLUMNS.values() if any(line.memory.get(name) for line in lines)]
    longest = max((line.share for line in lines), default=0.0) or 1.0
    made = table([(name, {"layer": "left", "": "bar"}.get(name, "right")) for name in columns])
    for outside in (False, True):
        for line in lines:
            if line.outside == outside:
                made.add_row(*_cells(line, columns, longest), style="dim" if outside else "")
        made.add_section()
    made.add_row(*_cells(total, columns, longest), style="bold")
    return [*header(result), "", made, "", *_notes(result), *warning_lines(result.warnings)]


def layers_lines(result: LayersResult, view: LayersView) -> list[Line]:
    """The table's lines: the model's layers and what lies outside them."""
    whole, steps = result.summary.shown_ns, _divisor(result)
    ms = Milliseconds.for_total(whole, steps)
    rows = result.tree.to_dict("records")
    rounded = iter(percents([row["total_ns"] for row in rows if row["depth"] == 0]))
    memory = iter(_memory(result))
    lines = []
    for row in rows:
        share = row["total_ns"] / whole if whole else 0.0
        line = Line(
            label=tree_label(row),
            calls=count_per_step(row["calls"], steps),
            times={phase: ms(_in_phase(row, phase)) for phase in _PHASES},
            total=ms(row["total_ns"]),
            percent=percent(share) if row["depth"] else next(rounded),
            share=share,
            cpu=ms(row["cpu_ns"]),
            comm=ms(row["comm_ns"]),
            outside=row["layer"] == NO_LAYER,
            memory=next(memory),
        )
        if view.shows(row):
            lines.append(line)
    return lines


def total_line(result: LayersResult) -> Line:
    """The last line: the sum of the tree's top level, which is the sum of all operations."""
    ms = Milliseconds.for_total(result.summary.shown_ns, _divisor(result))
    top = [row for row in result.tree.to_dict("records") if row["depth"] == 0]
    return Line(
        label="total",
        calls="",
        times={phase: ms(sum(_in_phase(row, phase) for row in top)) for phase in _PHASES},
        total=ms(sum(row["total_ns"] for row in top)),
        percent=percent(1.0 if result.summary.shown_ns else 0.0),
        comm=ms(sum(row["comm_ns"] for row in top)),
        memory={MEMORY_COLUMNS["cuda_bytes"]: mib(_from_cuda(result))} if _from_cuda(result) else {},
    )


def header(result: LayersResult) -> list[RenderableType]:
    """Which capture this is, what it amounts to, and how much of it is in a named layer."""
    info, summary, steps = result.info, result.summary, _divisor(result)
    whole, wall = Milliseconds.for_total(summary.total_ns), Milliseconds.for_total(summary.wall_ns)
    amount = f"{whole(summary.total_ns) or '0'} ms"
    if steps > 1:
        per_step, of_steps = (Milliseconds.for_total(summary.shown_ns, parts) for parts in (steps, 1))
        shown = f"{of_steps(summary.shown_ns) or '0'} ms in {steps} steps"
        amount = f"{per_step(summary.shown_ns) or '0'} ms per step ({shown})"
    named = percent(summary.layer_ns / max(summary.work_ns, 1))
    lines = [
        capture_line(info, summary.all_steps),
        Text(
            f"{heading(time_name(result))}: {amount}, {summary.ops:,} operations in {wall(summary.wall_ns) or '0'} ms"
        ),
        Text(
            f"In a named layer: {named} of it{_without_comm(summary)}, {percent(summary.loop_layer_share)} of forward "
            "and backward"
        ),
        *map(Text, apart(result)),
    ]
    if not info.on_gpu:
        lines.append(Text("Operations are CPU operators: this capture has no GPU"))
    if set(summary.by_how) - {"launch"}:
        told = (f"{how} {percent(ns / max(summary.total_ns, 1))}" for how, ns in summary.by_how.items())
        lines.append(Text(f"Owner told by: {', '.join(told)}"))
    return list(lines)


def _without_comm(summary: Summary) -> str:
    return " without communication" if summary.comm_ns else ""


def apart(result: LayersResult) -> list[str]:
    """What is in no figure per step, a line each."""
    summary, lines = result.summary, []
    if summary.outside_ns and not result.steps.asked:
        outside = Milliseconds.for_total(summary.total_ns)(summary.outside_ns)
        lines.append(f"Outside steps: {outside} ms in the whole capture, in no figure per step")
    lines += [f"Warm-up, in no figure per step: {said}" for said in result.steps.left_out]
    return lines


def time_name(result: LayersResult) -> str:
    """What the times are: of the GPU, or of CPU operators where the capture has none."""
    return "GPU time" if result.info.on_gpu else "operator time"


def heading(text: str) -> str:
    """A text with a capital first letter."""
    return text[:1].upper() + text[1:]


def tree_label(row: Row) -> str:
    """A row by its name below its parent's, indented: ``self_attn`` in ``model.layers.3``; or ``(none) optimizer``."""
    if row["layer"] == NO_LAYER:
        return f"{NO_LAYER} {row['phase']}"
    return "  " * int(row["depth"]) + str(row["layer"]).removeprefix(f"{row['parent']}.")


def _from_cuda(result: LayersResult) -> int:
    """All that CUDA handed out, where nothing of the tree ran too."""
    return 0 if result.memory is None else int(result.memory.rows["cuda_alloc_bytes"].sum())


def _memory(result: LayersResult) -> list[Mapping[str, str]]:
    """The memory of each row of the tree, '' where it is not told."""
    if result.memory is None:
        return [{}] * len(result.tree)
    from nvprof_kit._analysis.layers.memory import memory_tree

    rows = memory_tree(result.memory, result.tree).rename(columns=MEMORY_COLUMNS).fillna(0).to_dict("records")
    return [{name: mib(int(n)) if n else "" for name, n in row.items()} for row in rows]


def _divisor(result: LayersResult) -> int:
    """What times are divided by: the number of steps, where there are any."""
    return max(result.summary.steps, 1)


def _in_phase(row: Row, phase: str) -> int:
    """A row's time in one of the layers' phases; outside the layers, the loop's ``forward`` is forward too."""
    return int(row["other_ns"] if row["phase"] == phase else row[f"{phase}_ns"])


def _cells(line: Line, columns: Sequence[str], longest: float) -> list[RenderableType]:
    cells: dict[str, RenderableType] = {
        "layer": line.label,
        "calls": line.calls,
        **line.times,
        "total": line.total,
        "comm": line.comm,
        "share": line.percent,
        "": Bar(line.share / longest),
        "CPU": line.cpu,
        **{name: line.memory.get(name, "") for name in MEMORY_COLUMNS.values()},
    }
    return [cells[name] for name in columns]


def _notes(result: LayersResult) -> list[Text]:
    unit = "Milliseconds per step" if result.summary.steps > 1 else "Milliseconds"
    what = f"{unit} of {time_name(result)}; a layer's hold its children's."
    notes = [Text(f"{what} CPU is the time its ranges were open on the CPU.", "dim")]
    if result.summary.comm_ns:
        notes.append(Text("comm is the part of total in communication, which may be waiting for other ranks.", "dim"))
    if result.memory is not None:
        notes.append(
            Text(
                "MiB of 1,048,576 bytes: kept is what a call of its forward leaves allocated, peak the most while it "
                "ran, CUDA what CUDA itself handed out in the whole capture.",
                "dim",
            )
        )
        if result.memory.before_bytes:
            notes.append(Text(f"{mib(result.memory.before_bytes)} MiB were there when the capture began.", "dim"))
    return notes
