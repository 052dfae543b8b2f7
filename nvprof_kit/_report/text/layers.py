"""Text report of the per-layer table: the model as an indented tree, with forward and backward or steps in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.fold import fold_tree
from nvprof_kit._analysis.layers.layers import Layers
from nvprof_kit._analysis.layers.sums import SPLITS
from nvprof_kit._report.text.table import FOLD_COLUMNS, Bar, Column, Grid, below, capture_line, fold_cells, fold_notes
from nvprof_kit._report.text.texts import (
    TEXTS,
    Milliseconds,
    count_per_step,
    is_missing,
    memory_size,
    mib_cell,
    percent,
    percents,
)
from nvprof_kit.issues import SMALL
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

Row = dict[Any, Any]
"""A row of `nvprof_kit._analysis.layers.layers.Layers.tree`."""

Line = tuple[Row, dict[str, str]]
"""A row with its cells by the names of `COLUMNS`."""

MEMORY_COLUMNS = ("kept_bytes", "peak_bytes", "cuda_bytes")
"""The columns of `nvprof_kit._analysis.layers.memory.LayerMemory.of_tree`."""

_column = partial(Column.of, Layers.columns["layers"])

COLUMNS: Mapping[str, Column] = {
    "layer": _column("layer", "path"),
    "calls": _column("calls", rank=3),
    **{phase: Column(phase, is_optional=phase == "recompute") for phase in LAYER_PHASES},
    "total_ns": _column("gpu_total_ns", rank=0),
    "comm_ns": _column("comm_ns", is_optional=True),
    "of_limit": _column("of_limit", is_optional=True),
    "self_share": _column("share", rank=3),
    "total_share": _column("total_share", rank=0),
    "bar": Column("", "bar"),
    "cpu_ns": _column("cpu_ns", rank=4),
    "kept_bytes": _column("memory_retained_bytes", rank=2, is_optional=True),
    "peak_bytes": _column("memory_peak_bytes", rank=2, is_optional=True),
    "cuda_bytes": _column("cuda_alloc_bytes", rank=2, is_optional=True),
}
"""The printed columns with their headings, in their order; the page of `report` takes the headings from here."""

MAX_STEPS = 8
"""Maximum number of steps with a column; data formats contain all steps."""

OUTSIDE = "outside"
"""Heading of the column for work outside steps."""

LITTLE = 0.7
"""With the GPU busy for less than this share of the steps, what it waits for matters more than its layers."""


def layers_report(result: Layers) -> list[RenderableType]:
    """The capture, the tree with its times, or with a column per step if the rows are by step, and all warnings."""
    parts = steps_table(result) if "step" in result.rows else tree_table(result)
    return [*header(result), "", *parts, *below((), result.warnings)]


def tree_table(result: Layers) -> list[RenderableType]:
    """The table with a column per phase, and a description of its figures."""
    splits = {name: Column(heading, rank=2) for name, heading in split_headings(result).items()}
    columns: dict[str, Column] = {}
    for name, column in COLUMNS.items():
        columns |= splits if name == "total_ns" else {}
        if not (splits and name in LAYER_PHASES):
            columns[name] = column
    grid = _grid(result, columns | FOLD_COLUMNS, tree_lines(result), total_line(result))
    return [grid, "", *below(_notes(result, grid), ())]


def steps_table(result: Layers) -> list[RenderableType]:
    """The table with a column per step, and a description of its figures."""
    times: Any = layers_by_step(result)
    step_of = dict(zip(result.rows["instance"], result.rows["step"], strict=True))
    repeats = len({*step_of.values()}) < len(step_of)  # ranges of one number, which csv tells apart by `instance`
    of_instance = {name: f"step {step}" + f" ({name})" * repeats for name, step in step_of.items()}
    headings = {name: of_instance.get(name, OUTSIDE) for name in times.columns[:MAX_STEPS]}
    ms = Milliseconds.for_total(int(times.loc["total"].max()) if len(times.columns) else 0)
    by_row = times[list(headings)].iloc[:-1].set_axis(result.tree.index)
    tree = printed_tree(result, by_row.rename(columns={name: f"in {name}" for name in headings}))
    lines = [
        (row, {"layer": _label(result, row), **{str(name): ms(row[f"in {name}"]) for name in headings}})
        for row in tree.to_dict("records")
    ]
    total = {"layer": "total", **{str(name): ms(int(times.loc["total", name])) for name in headings}}
    columns = {"layer": COLUMNS["layer"], **{str(name): Column(text) for name, text in headings.items()}}
    note = f"Milliseconds of {time_name(result)} in each step, all phases together, including nested layers."
    if (left_out := len(times.columns) - MAX_STEPS) > 0:
        note += f" {left_out} more columns are left out here; -o FILE.csv has all steps."
    return [_grid(result, columns, lines, total), "", Text(note, "dim")]


def _grid(result: Layers, columns: Mapping[str, Column], lines: Sequence[Line], total: Mapping[str, str]) -> Grid:
    """The rows of layers, of what ran outside layers, and the total."""
    grid = Grid(columns, result.select)
    longest = max((row["total_ns"] for row, _ in lines), default=0) or 1
    for outside in (False, True):
        for row, cells in lines:
            if (row["layer"] == NO_LAYER) == outside:
                bar = Bar(row["total_ns"] / longest)
                grid.add({**cells, "bar": bar}, style="dim" if outside else "", cost=row["total_ns"])
        grid.add_section()
    grid.add({**total, "layer": "total of all rows"} if result.select.where else total, style="bold")
    return grid


def layers_by_step(result: Layers) -> pd.DataFrame:
    """Time of each row of the tree by step, in ns, including nested layers, with the sum as the last row.

    Returns:
        A column for each step instance in order, then `OUTSIDE` if there is work outside steps; an int64 row for each
        row of `Layers.tree`, in its order, and one for the total.
    """
    rows, tree = result.rows, result.tree
    steps = rows["instance"].astype(object).where(rows["instance"].notna(), OUTSIDE)
    total_ns: Any = rows["gpu_total_ns"].groupby([row_names(rows), steps]).sum().unstack(fill_value=0).astype("int64")
    total_ns = total_ns[[*sorted(set(total_ns) - {OUTSIDE}), *({OUTSIDE} & set(total_ns))]]
    times: pd.DataFrame = total_ns.reindex(row_names(tree).tolist(), fill_value=0)
    times.loc["total"] = times[(tree["depth"] == 0).to_numpy()].sum()
    return times


def row_names(rows: pd.DataFrame) -> pd.Series[str]:
    """What rows are called: a layer's path, or ``(none) optimizer``."""
    return rows["layer"].where(rows["layer"] != NO_LAYER, NO_LAYER + " " + rows["phase"])


def printed_tree(result: Layers, times: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of the tree that are printed, with memory and the columns of `nvprof_kit._analysis.layers.fold`.

    Args:
        result: The per-layer table.
        times: Additional columns of times, with a row for each row of the tree.
    """
    select, tree, rows = result.select, result.tree, result.rows
    if select.sort or "limit_ns" in rows:  # the columns of csv, over all phases
        figures = rows.select_dtypes("number")
        if "limit_ns" in rows:
            figures = figures.assign(limited_ns=rows["gpu_busy_ns"].where(rows["limit_ns"] > 0, 0))
        sums = figures.groupby(row_names(rows)).sum().reindex(row_names(tree), fill_value=0).set_axis(tree.index)
        tree = tree.join(sums[[name for name in sums if name not in tree]])
    tree = tree if times is None else tree.assign(**dict(times))
    if result.depth is not None:
        tree = tree[tree["depth"] < result.depth]
    printed, _ = fold_tree(select.among(tree), select.fold)
    if "limit_ns" in printed:
        printed["of_limit"] = printed["limit_ns"] / printed["limited_ns"]
    return select.sorted(printed)


def tree_lines(result: Layers) -> list[Line]:
    """The rows of the tree that are printed, each with its cells by the names of `COLUMNS`."""
    total_ns, steps = result.summary.total_ns, _divisor(result)
    ms = Milliseconds.for_total(total_ns, steps)
    rows = printed_tree(result).to_dict("records")
    top_ns = [row["total_ns"] for row in rows if row["depth"] == 0]
    # the shares of layers that were picked need not add up
    picked = result.select.asked
    top_shares = iter([percent(ns / (total_ns or 1)) for ns in top_ns] if picked else percents(top_ns))
    lines = []
    for row in rows:
        total_share = percent(row["total_ns"] / (total_ns or 1)) if row["depth"] else next(top_shares)
        is_all = row["self_ns"] == row["total_ns"]
        cells = {
            "layer": _label(result, row),
            "calls": count_per_step(row["calls"], steps),
            "self_share": (total_share if is_all else percent(row["self_ns"] / total_ns)) if row["self_ns"] else "",
            "total_share": total_share,
            "cpu_ns": ms(row["cpu_ns"]),
            **_times(result, row, ms),
            **fold_cells(row, ms),
        }
        if row.get("limit_ns"):
            cells["of_limit"] = percent(row["of_limit"])
        for name in MEMORY_COLUMNS:
            if not is_missing(count := row.get(name)) and count:
                cells[name] = mib_cell(count)
        lines.append((row, cells))
    return lines


def total_line(result: Layers) -> dict[str, str]:
    """The cells of the last line: the sum of the tree's top level, which is the sum of all operations."""
    ms = Milliseconds.for_total(result.summary.total_ns, _divisor(result))
    top = result.tree[result.tree["depth"] == 0]
    row: Row = {"phase": "", **top.select_dtypes("number").sum().to_dict()}
    row |= {f"{phase}_ns": sum(in_phase(of, phase) for of in top.to_dict("records")) for phase in LAYER_PHASES}
    cuda_bytes = 0 if result.memory is None else int(result.rows["cuda_alloc_bytes"].sum())
    cells = {"total_share": percent(float(bool(result.summary.total_ns)))}
    cells["cuda_bytes"] = mib_cell(cuda_bytes) if cuda_bytes else ""
    return {"layer": "total", **_times(result, row, ms), **cells}


def _times(result: Layers, row: Row, ms: Milliseconds) -> dict[str, str]:
    """The GPU times of a row by the names of their columns."""
    cells = {phase: ms(in_phase(row, phase)) for phase in LAYER_PHASES}
    cells |= {name: ms(row[name]) for name in ("total_ns", *split_headings(result))}
    return {**cells, "comm_ns": ms(row["comm_ns"]) if result.summary.comm_ns else ""}


def split_headings(result: Layers) -> dict[str, str]:
    """The headings of the columns that split the time."""
    return {
        name: name.removeprefix(SPLITS[by]).removesuffix("_ns").replace("_", " ")
        for by, names in result.splits.items()
        for name in names
    }


def in_phase(row: Row, phase: str) -> int:
    """Time of a row in a layer phase; outside layers, the loop's ``forward`` phase counts as forward."""
    return int(row["other_ns"] if row["phase"] == phase else row[f"{phase}_ns"])


def header(result: Layers) -> list[RenderableType]:
    """Lines about the capture: its contents, total, and the share of the total in named layers."""
    info, summary, steps = result.info, result.summary, _divisor(result)
    amount = Milliseconds.for_total(summary.total_ns).with_unit(summary.total_ns)
    if steps > 1:
        per_step = Milliseconds.for_total(summary.total_ns, steps).with_unit(summary.total_ns)
        amount = f"{per_step} per step ({amount} in {steps} steps)"
    lines = [f"{capitalized(time_name(result))}: {amount}, {summary.ops:,} operations"]
    if info.on_gpu and summary.wall_ns:
        wall = Milliseconds.for_total(summary.wall_ns, steps).with_unit(summary.wall_ns)
        look = "; `nvprof-kit breakdown --view idle` says what it waited for" if summary.busy_share < LITTLE else ""
        lines.append(f"GPU busy: {percent(summary.busy_share)} of {wall}{' per step' if steps > 1 else ''}{look}")
    if summary.work_ns:
        work = f"it{' without communication' if summary.comm_ns else ''}"
        of_loop = f"{percent(summary.loop_layer_share)} of forward and backward"
        lines.append(f"In a named layer: {percent(summary.layer_ns / summary.work_ns)} of {work}, {of_loop}")
    lines += left_out_lines(result)
    if set(summary.by_how) - {"launch", "none"}:
        evidence, total_ns = TEXTS["evidence"], max(summary.total_ns, 1)
        shares = (f"{evidence[how]} {percent(ns / total_ns)}" for how, ns in summary.by_how.items())
        lines.append(f"An operation's layer is known from: {', '.join(shares)}")
    return [capture_line(info, summary.steps, summary.all_steps), *map(Text, lines)]


def left_out_lines(result: Layers) -> list[str]:
    """What the figures leave out, one line each."""
    summary, lines = result.summary, []
    if 0 < summary.outside_ns < SMALL * summary.capture_ns and not result.steps.asked:  # else a warning says it
        outside = Milliseconds.for_total(summary.capture_ns).with_unit(summary.outside_ns)
        lines.append(f"Outside steps: {outside} in the whole capture, left out; --steps all includes it")
    return lines + [f"Warm-up: {reason}; left out, --steps all includes it" for reason in result.steps.left_out]


def time_name(result: Layers) -> str:
    """Name of the times: GPU time, or CPU operator time if the capture has no GPU."""
    return "GPU time" if result.info.on_gpu else "operator time"


def capitalized(text: str) -> str:
    """Capitalize the first letter of a text."""
    return text[:1].upper() + text[1:]


def _label(result: Layers, row: Row) -> str:
    """Label of a line: the layer's name below its parent's, indented, or its path if parents may be missing; or
    ``(none) optimizer``; and the number of folded blocks.
    """
    if row["layer"] == NO_LAYER:
        return f"{NO_LAYER} {row['phase']}"
    indented = "  " * int(row["depth"]) + str(row["layer"]).removeprefix(f"{row['parent']}.")
    label = str(row["layer"]) if result.select.asked else indented
    return f"{label} x{row['count']}" if row["count"] > 1 else label


def _divisor(result: Layers) -> int:
    """Divisor of times: the number of steps, if any; 1 for the whole capture, which also has what ran outside steps."""
    return 1 if result.steps.everything else max(result.summary.steps, 1)


def _notes(result: Layers, grid: Grid) -> list[str]:
    unit = "Milliseconds per step" if _divisor(result) > 1 else "Milliseconds"
    notes = [TEXTS["notes"]["layers"].format(unit=unit, time=time_name(result))]
    if result.summary.comm_ns:
        notes.append("comm is the part of total in communication, which may be waiting for other ranks.")
    if "of_limit" in grid.printed_columns:
        measured = " By the peaks measured on this machine." if result.peaks and result.peaks.measured else ""
        notes.append(TEXTS["notes"]["of_limit"] + measured)
    notes += fold_notes(grid, "their sums", "of one of them, without communication")
    if result.memory is not None:
        notes.append(TEXTS["notes"]["layer_memory"])
        if result.memory.before_bytes:
            notes.append(f"{memory_size(result.memory.before_bytes)} were allocated before the capture began.")
    return notes
