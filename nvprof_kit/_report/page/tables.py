"""Tables of analyses on the page: header, cells with sort values, and omissions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
