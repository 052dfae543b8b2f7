"""The tables of the page: views of breakdown, and kernels by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._report.page.timeline import Block, Texts
from nvprof_kit._report.text.units import Cells, mib_cell, percent, rate_cell

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.breakdown.breakdown import Breakdown


MAX_TABLE_ROWS = 100
"""Maximum number of table rows on the page; a command next to the table shows all."""

MAX_TEXT = 1000
"""Maximum length of a name; longer names are cut and show their length."""

_SHARES = ("share", "hidden", "of_link", "saved_share")
_TITLES = {
    "idle": ("Idle time by its cause", "why the GPU was idle, and where the host was"),
    "communication": ("Communication", "collectives by layer, and their exposed part"),
    "copies": ("Copies", "copies and memsets by layer"),
    "launches": ("Launches", "where the host cannot launch as fast as the GPU works"),
    "critical-path": ("Critical path", "what determines the length of the median step"),
}


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        name: Name in links.
        title: The heading.
        about: A description.
        heads: Name of each column, and whether it is numeric.
        rows: Lists of cells, each with text and sort value.
        note: What is omitted; '' for nothing.
        command: The command that shows the whole table.
    """

    name: str
    title: str
    about: str
    heads: list[tuple[str, bool]]
    rows: list[list[tuple[str, Any]]]
    note: str = ""
    command: str = ""


def page_table(
    frame: pd.DataFrame, name: str, title: str, *, about: str = "", command: str = "", divisor: int = 1,
    limit: int = MAX_TABLE_ROWS,
) -> PageTable:  # fmt: skip
    """A table of an analysis; empty columns are left out.

    Args:
        frame: The rows, the most important first.
        name: Name in links.
        title: The heading.
        about: A description.
        command: The command that shows the whole table.
        divisor: Number of steps to divide times by.
        limit: Maximum number of rows.
    """
    head_rows = frame.iloc[:limit]
    columns = [str(column) for column in head_rows.columns if not _empty(head_rows[column])]
    numbers = {
        column: head_rows[column].dtype.kind in "iufb" or str(head_rows[column].dtype).startswith("Int")
        for column in columns
    }
    cells = [[_cell(column, value, divisor) for value in head_rows[column].tolist()] for column in columns]
    omitted = len(frame) - len(head_rows)
    return PageTable(
        name=name,
        title=title,
        about=about,
        heads=[(_head(column), numbers[column]) for column in columns],
        rows=[list(row) for row in zip(*cells, strict=True)],
        note=f"{omitted:,} more rows are not on the page" if omitted else "",
        command=command,
    )


def breakdown_tables(breakdown: Breakdown, path: str, limit: int = MAX_TABLE_ROWS) -> list[PageTable]:
    """The tables of a breakdown that are not empty."""
    tables = [_steps(breakdown, path, limit)]
    step = breakdown.steps["step"].iloc[breakdown.critical_window] if len(breakdown.steps) else None
    for view, (title, about) in _TITLES.items():
        rows = breakdown.table(view)
        if len(rows):
            of_step = f" of step {step}" if view == "critical-path" and str(step) not in ("None", "<NA>") else ""
            tables.append(
                page_table(
                    rows,
                    view,
                    title + of_step,
                    about=f"{about}; milliseconds over all steps that are shown" if not of_step else about,
                    command=f"nvprof-kit breakdown {path} --view {view} --format csv",
                    limit=limit,
                )
            )
    return tables


def _steps(breakdown: Breakdown, path: str, limit: int) -> PageTable:
    times = [name for name in breakdown.steps.columns if str(name).endswith("_ns") and name != "start_ns"]
    several = [name for name in ("process", "device") if breakdown.steps[name].nunique() > 1]
    rows = breakdown.steps[["step", *several, *times]]
    return page_table(
        rows,
        "breakdown",
        "Breakdown: where each step's time goes",
        about="milliseconds; compute, exposed communication, exposed copies and idle add up to the wall time",
        command=f"nvprof-kit breakdown {path} --format csv",
        limit=limit,
    )


def short_text(text: str) -> str:
    """A text cut to `MAX_TEXT` characters, with its length if it was longer."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def _head(name: str) -> str:
    if name == "bytes" or name.endswith("_bytes"):
        name = f"{name.removesuffix('bytes')}MiB"
    return name.removesuffix("_ns").replace("gb_per_s", "GB/s").replace("_", " ")


def _empty(values: pd.Series[Any]) -> bool:
    """Whether a column contains only zero times or missing values."""
    if values.isna().all():
        return True
    if str(values.name).endswith("_ns"):
        return bool((values.fillna(0) == 0).all())
    return values.dtype == object and bool((values == "").all())


def _cell(name: str, value: Any, divisor: int) -> tuple[str, Any]:
    """A cell: its text and its sort value."""
    if value is None or str(value) in ("nan", "<NA>"):
        return "", ""
    if isinstance(value, str):
        return short_text(value), ""
    return _number(name, value, divisor), value


def _number(name: str, value: Any, divisor: int) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if name.endswith("_at_ns"):
        return f"{value / 1e6:,.3f}"
    if name.endswith("_ns"):
        return Cells(divisor, 3)(int(value))
    if name == "bytes" or name.endswith("_bytes"):
        return mib_cell(int(value))
    if name in _SHARES or name.endswith("gb_per_s"):
        return (percent if name in _SHARES else rate_cell)(float(value))
    return f"{value:,.1f}" if isinstance(value, float) and math.isfinite(value) else f"{value:,}"


MAX_KERNELS = 20_000
"""Maximum number of rows of all captures on a page; the costliest are kept."""


@dataclass(frozen=True)
class KernelTable:
    """The kernels of the shown steps.

    Attributes:
        rows: name, kernel_class, layer, phase, calls, total_ns, min_ns, max_ns; the costliest first.
    """

    rows: pd.DataFrame


def kernel_table(operations: Operations, is_counted: npt.NDArray[np.bool_]) -> KernelTable:
    """The operations by name, layer and phase.

    Args:
        operations: The operations, with names.
        is_counted: Which operations count.
    """
    import pandas as pd

    ops = operations.trace.ops
    chosen = np.flatnonzero(is_counted)
    layer, phase = op_owners(operations.attribution)
    names = ops["name"].cat
    codes = [column.codes.astype(np.int64)[chosen] for column in (layer, phase)]
    key = names.codes.to_numpy().astype(np.int64)[chosen]
    for code, column in zip(codes, (layer, phase), strict=True):
        key = key * (len(column.categories) + 1) + code
    group, _ = pd.factorize(key)
    groups = int(group.max(initial=-1)) + 1
    first = np.full(groups, len(chosen), dtype=np.int64)
    first[group[::-1]] = np.arange(len(chosen))[::-1]
    length = (ops["end_ns"].to_numpy() - ops["start_ns"].to_numpy())[chosen]
    shortest, longest = np.full(groups, np.iinfo(np.int64).max), np.zeros(groups, dtype=np.int64)
    np.minimum.at(shortest, group, length)
    np.maximum.at(longest, group, length)
    where = chosen[first]
    rows = pd.DataFrame(
        {
            "name": names.categories.to_numpy(dtype=object)[names.codes.to_numpy()[where]],
            "kernel_class": np.array(list(CLASSES), dtype=object)[operations.classes.code[where]],
            "layer": layer.categories.to_numpy(dtype=object)[layer.codes[where]],
            "phase": phase.categories.to_numpy(dtype=object)[phase.codes[where]],
            "calls": np.bincount(group, minlength=groups),
            "total_ns": exact_sums(group, length, groups),
            "min_ns": shortest,
            "max_ns": longest,
        }
    )
    return KernelTable(rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True))


def drawn_kernels(table: KernelTable, texts: Texts, block: Block, limit: int = MAX_KERNELS) -> dict[str, Any]:
    """The table as columns of a block, and a sentence about omissions."""
    rows, omitted = table.rows.iloc[:limit], table.rows.iloc[limit:]
    gone = omitted["total_ns"].sum() / max(int(table.rows["total_ns"].sum()), 1)
    note = f"{len(omitted):,} more rows, {100 * gone:.2f} % of the time, are not on the page" if len(omitted) else ""
    columns = {name: block.add(texts.of(rows[name])) for name in ("name", "kernel_class", "layer", "phase")}
    columns |= {name: block.add(rows[f"{name}_ns"]) for name in ("total", "min", "max")}
    return {**columns, "calls": block.add(rows["calls"]), "whole": int(table.rows["total_ns"].sum()), "note": note}
