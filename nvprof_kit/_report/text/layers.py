"""Text report of the per-layer table: the model as an indented tree, forward and backward side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.fold import LEAST, MANY, fold, most_equal
from nvprof_kit._analysis.layers.memory import memory_tree
from nvprof_kit._analysis.layers.split import SPLITS
from nvprof_kit._analysis.layers.warnings import NOTABLE
from nvprof_kit._report.text.table.folded import KINDS, RANKS, fold_cells, fold_columns, fold_notes
from nvprof_kit._report.text.table.terminal import Bar, capture_line, table, warning_lines
from nvprof_kit._report.text.table.units import (
    Cells,
    Milliseconds,
    count_per_step,
    memory_size,
    mib_cell,
    percent,
    percents,
)
from nvprof_kit._result.selection import UNFOLDED, Selection
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.layers.layers import Layers, Summary

Row = dict[Any, Any]
"""A row of `nvprof_kit._analysis.layers.layers.Layers.tree`."""

_PHASES = tuple(category.value for category in LAYER_CATEGORIES)
_RANKS = {"total": 0, "total share": 0, "self share": 3, "calls": 3, "CPU": 4}
_RANKS |= {"kept MiB": 2, "peak MiB": 2, "CUDA MiB": 2} | RANKS
MEMORY_COLUMNS = {"kept_bytes": "kept MiB", "peak_bytes": "peak MiB", "cuda_bytes": "CUDA MiB"}
"""Headers of the columns of `nvprof_kit._analysis.layers.memory.memory_tree`."""


@dataclass(frozen=True)
class LayersView:
    """Which part of the model to show.

    Attributes:
        depth: Levels of the tree; None for all. A layer's figures include nested layers.
        select: Selection, order and folding of lines.
    """

    depth: int | None = None
    select: Selection = UNFOLDED

    def shows(self, row: Row) -> bool:
        """Whether a row of the tree is shown."""
        return self.depth is None or row["depth"] < self.depth

    @property
    def flat(self) -> bool:
        """Whether lines show full paths, because their parents may be missing."""
        return self.select.asked

    def tree(self, result: Layers, times: pd.DataFrame | None = None) -> pd.DataFrame:
        """The shown rows with memory, and the columns of `nvprof_kit._analysis.layers.fold`.

        Args:
            result: The per-layer table.
            times: Additional columns of times, with a row for each row of the tree.
        """
        memory = None if result.memory is None else memory_tree(result.memory, result.tree)
        tree = result.tree if memory is None else result.tree.assign(**memory)
        tree = tree if times is None else tree.assign(**times)
        tree = self.select.among(tree)
        if self.depth is not None:
            tree = tree[tree["depth"] < self.depth]
        tree = folded_tree(tree, self.select.fold)
        if not self.select.sort:
            return tree
        key = self.select.sort.strip().lower().removesuffix("_ns").replace("-", "_")
        return self.select.changed(sort=_SORTS.get(key, self.select.sort)).sorted(tree)


_SORTS = dict.fromkeys(("gpu_self", "gpu_total", "gpu_busy", "share"), "total_ns")
"""Sort columns of the data that have a different name in the tree."""


_JOINED = {"peak_bytes": "max"}
"""Aggregation of folded columns other than sums."""


def folded_tree(tree: pd.DataFrame, wanted: bool | None) -> pd.DataFrame:
    """The tree with equal blocks folded, if requested or, by default, if there are many."""
    memory = [name for name in MEMORY_COLUMNS if name in tree]
    found = fold(tree.drop(columns=memory), LEAST if wanted is not False else len(tree) + 2)
    if wanted is None and most_equal(found) < MANY:
        found = fold(tree.drop(columns=memory), len(tree) + 2)
    made: pd.DataFrame = found.tree.assign(
        **{name: found.joined(tree[name], _JOINED.get(name, "sum")) for name in memory}
    )
    return made


@dataclass(frozen=True)
class Line:
    """One line of the table, as data.

    Attributes:
        label: Name of the layer below its parent, indented, or ``(none) optimizer``.
        calls: Number of calls, per step if there are steps.
        times: Milliseconds in forward, backward and recompute; '' for none.
        total: Total milliseconds.
        percent: Share of the shown total with nested layers, as text.
        share: The same as a number, 0 to 1.
        cpu: Milliseconds its ranges were open on the CPU.
        comm: Milliseconds of the total in communication.
        outside: Whether it is outside all layers.
        self_percent: Share of the shown total without nested layers, as text.
        memory: MiB by the headers in `MEMORY_COLUMNS`, if memory was requested.
        more: Other cells by header: median, min and max of equal blocks, how a block differs from its equals, and split
            times.
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
    self_percent: str = ""
    memory: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)


def layers_report(result: Layers, view: LayersView) -> list[RenderableType]:
    """The report: the capture, the table, and all warnings."""
    lines = layers_lines(result, view)
    total = total_line(result)
    columns = _columns(result, lines, total)
    longest = max((line.share for line in lines), default=0.0) or 1.0
    kinds = {"layer": "path", "": "bar", **KINDS}
    made = table([(name, kinds.get(name, "right")) for name in columns], _RANKS | _split_ranks(result))
    made.choose(view.select)
    for outside in (False, True):
        for line in lines:
            if line.outside == outside:
                made.add_row(*_cells(line, columns, longest), style="dim" if outside else "", cost=line.share)
        made.add_section()
    made.add_row(*_cells(total, columns, longest), style="bold")
    return [*header(result), "", made, "", *_notes(result, columns), *warning_lines(result.warnings)]


def _columns(result: Layers, lines: Sequence[Line], total: Line) -> list[str]:
    """The headers of the non-empty columns."""
    parts = [head for heads in split_heads(result).values() for head in heads.values()]
    used = {"recompute": bool(total.times["recompute"]), "comm": bool(result.summary.comm_ns)}
    phases = [phase for phase in _PHASES if used.get(phase, True)] if not parts else []
    rest = [name for name in ("total", "comm", "self share", "total share", "", "CPU") if used.get(name, True)]
    memory = [name for name in MEMORY_COLUMNS.values() if any(line.memory.get(name) for line in lines)]
    more = fold_columns(line.more for line in lines)
    return ["layer", "calls", *phases, *parts, *rest, *memory, *more]


def split_heads(result: Layers) -> dict[str, dict[str, str]]:
    """Headers of split time columns by column name, for each way to split."""
    return {
        by: {name: name.removeprefix(SPLITS[by]).removesuffix("_ns").replace("_", " ") for name in names}
        for by, names in result.splits.items()
    }


def _split_ranks(result: Layers) -> dict[str, int]:
    return {head: 2 for heads in split_heads(result).values() for head in heads.values()}


def layers_lines(result: Layers, view: LayersView) -> list[Line]:
    """The lines of the table: the model's layers, then rows outside layers."""
    whole, steps = result.summary.total_ns, _divisor(result)
    ms: Milliseconds = Cells.for_total(whole, steps)
    rows = view.tree(result).to_dict("records")
    top = [row["total_ns"] for row in rows if row["depth"] == 0]
    rounded = iter([percent(ns / (whole or 1)) for ns in top] if view.flat else percents(top))
    heads = {name: head for heads in split_heads(result).values() for name, head in heads.items()}
    lines = []
    for row in rows:
        share = row["total_ns"] / whole if whole else 0.0
        lines.append(
            Line(
                label=line_label(row, view.flat),
                calls=count_per_step(row["calls"], steps),
                times={phase: ms(_in_phase(row, phase)) for phase in _PHASES},
                total=ms(row["total_ns"]),
                percent=percent(share) if row["depth"] else next(rounded),
                share=share,
                self_percent=percent(row["self_ns"] / whole) if whole and row["self_ns"] else "",
                cpu=ms(row["cpu_ns"]),
                comm=ms(row["comm_ns"]),
                outside=row["layer"] == NO_LAYER,
                memory=_memory(row),
                more={**fold_cells(row, ms), **{head: ms(row[name]) for name, head in heads.items() if row[name]}},
            )
        )
    return lines


def line_label(row: Row, flat: bool) -> str:
    """Label of a line: `tree_label`, or the full path in a flat table, and the number of folded blocks."""
    label = str(row["layer"]) if flat and row["layer"] != NO_LAYER else tree_label(row)
    return f"{label} x{row['count']}" if row["count"] > 1 else label


def total_line(result: Layers) -> Line:
    """The last line: the sum of the tree's top level, which is the sum of all operations."""
    ms = Cells.for_total(result.summary.total_ns, _divisor(result))
    top = [row for row in result.tree.to_dict("records") if row["depth"] == 0]
    return Line(
        label="total",
        calls="",
        times={phase: ms(sum(_in_phase(row, phase) for row in top)) for phase in _PHASES},
        total=ms(sum(row["total_ns"] for row in top)),
        percent=percent(1.0 if result.summary.total_ns else 0.0),
        comm=ms(sum(row["comm_ns"] for row in top)),
        more={
            head: ms(sum(row[name] for row in top))
            for heads in split_heads(result).values()
            for name, head in heads.items()
        },
        memory={MEMORY_COLUMNS["cuda_bytes"]: mib_cell(_from_cuda(result))} if _from_cuda(result) else {},
    )


def header(result: Layers) -> list[RenderableType]:
    """Lines about the capture: its contents, total, and the share of the total in named layers."""
    info, summary, steps = result.info, result.summary, _divisor(result)
    per_step, total = (Milliseconds.for_total(summary.total_ns, parts) for parts in (steps, 1))
    amount = f"{total(summary.total_ns) or '0'} ms"
    if steps > 1:
        amount = f"{per_step(summary.total_ns) or '0'} ms per step ({amount} in {steps} steps)"
    named = percent(summary.layer_ns / max(summary.work_ns, 1))
    lines = [
        capture_line(info, summary.all_steps, summary.steps),
        Text(f"{heading(time_name(result))}: {amount}, {summary.ops:,} operations"),
        *([Text(busy)] if (busy := _busy(result)) else []),
        Text(
            f"In a named layer: {named} of it{_without_comm(summary)}, {percent(summary.loop_layer_share)} of forward "
            "and backward"
        ),
        *map(Text, apart(result)),
    ]
    if not info.on_gpu:
        lines.append(Text("Operations are CPU operators: this capture has no GPU"))
    if set(summary.by_how) - {"launch"}:
        shares = (f"{how} {percent(ns / max(summary.total_ns, 1))}" for how, ns in summary.by_how.items())
        lines.append(Text(f"Attributed by: {', '.join(shares)}"))
    return list(lines)


LITTLE = 0.7
"""With the GPU busy for less than this share of the steps, what it waits for matters more than its layers."""


def _busy(result: Layers) -> str:
    """How much of the wall time the GPU was busy, and where to look if that is little."""
    summary = result.summary
    if not result.info.on_gpu or not summary.wall_ns:
        return ""
    wall = Milliseconds.for_total(summary.wall_ns, _divisor(result))(summary.wall_ns)
    of_what = f"{wall} ms{' per step' if summary.steps > 1 else ''}"
    look = "; `nvprof-kit breakdown --view idle` says what it waited for" if summary.busy_share < LITTLE else ""
    return f"GPU busy: {percent(summary.busy_share)} of {of_what}{look}"


def _without_comm(summary: Summary) -> str:
    return " without communication" if summary.comm_ns else ""


def apart(result: Layers) -> list[str]:
    """What the figures leave out, one line each."""
    summary, lines = result.summary, []
    if 0 < summary.outside_ns <= NOTABLE * summary.capture_ns and not result.steps.asked:  # else a warning says it
        outside = Milliseconds.for_total(summary.capture_ns)(summary.outside_ns)
        lines.append(f"Outside steps: {outside} ms in the whole capture, left out; --steps all includes it")
    lines += [f"Warm-up: {reason}; left out, --steps all includes it" for reason in result.steps.left_out]
    return lines


def time_name(result: Layers) -> str:
    """Name of the times: GPU time, or CPU operator time if the capture has no GPU."""
    return "GPU time" if result.info.on_gpu else "operator time"


def heading(text: str) -> str:
    """Capitalize the first letter of a text."""
    return text[:1].upper() + text[1:]


def tree_label(row: Row) -> str:
    """Indented name of a row relative to its parent: ``self_attn`` in ``model.layers.3``; or ``(none) optimizer``."""
    if row["layer"] == NO_LAYER:
        return f"{NO_LAYER} {row['phase']}"
    return "  " * int(row["depth"]) + str(row["layer"]).removeprefix(f"{row['parent']}.")


def _from_cuda(result: Layers) -> int:
    """Total bytes allocated from CUDA, also where no row of the tree ran."""
    return 0 if result.memory is None else int(result.memory.rows["cuda_alloc_bytes"].sum())


def _memory(row: Row) -> Mapping[str, str]:
    """The memory of a row; '' if unknown."""
    values: dict[str, Any] = {head: row.get(name) for name, head in MEMORY_COLUMNS.items()}
    if not any(name in row for name in MEMORY_COLUMNS):
        return {}
    known = {head: 0 if str(count) in ("nan", "<NA>", "None") else int(count) for head, count in values.items()}
    return {head: mib_cell(count) if count else "" for head, count in known.items()}


def _divisor(result: Layers) -> int:
    """Divisor of times: the number of steps, if any; 1 for the whole capture, which also has what ran outside steps."""
    return 1 if result.steps.everything else max(result.summary.steps, 1)


def _in_phase(row: Row, phase: str) -> int:
    """Time of a row in a layer phase; outside layers, the loop's ``forward`` phase counts as forward."""
    return int(row["other_ns"] if row["phase"] == phase else row[f"{phase}_ns"])


def _cells(line: Line, columns: Sequence[str], longest: float) -> list[RenderableType]:
    cells: dict[str, RenderableType] = {
        "layer": line.label,
        "calls": line.calls,
        **line.times,
        "total": line.total,
        "comm": line.comm,
        "self share": line.self_percent,
        "total share": line.percent,
        "": Bar(line.share / longest),
        "CPU": line.cpu,
        **line.memory,
        **line.more,
    }
    return [cells.get(name, "") for name in columns]


def _notes(result: Layers, columns: Sequence[str]) -> list[Text]:
    unit = "Milliseconds per step" if _divisor(result) > 1 else "Milliseconds"
    what = f"{unit} of {time_name(result)}, with nested layers"
    notes = [Text(f"{what}; self share: without. CPU: wall time inside the layer's ranges.", "dim")]
    if result.summary.comm_ns:
        notes.append(Text("comm is the part of total in communication, which may be waiting for other ranks.", "dim"))
    notes += fold_notes(columns, "their sums", "of one of them, without communication")
    if result.memory is not None:
        notes.append(
            Text(
                "MiB of 1,048,576 bytes: kept is what one forward call leaves allocated, peak the maximum while it "
                "ran, CUDA what cudaMalloc allocated in the whole capture.",
                "dim",
            )
        )
        if result.memory.before_bytes:
            notes.append(
                Text(f"{memory_size(result.memory.before_bytes)} were allocated before the capture began.", "dim")
            )
    return notes
