"""Tables of an analysis as the page shows them: a head, cells with what they are sorted by, and what is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.text.table.units import Milliseconds, mib, percent

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.breakdown.breakdown import BreakdownResult

MAX_TABLE_ROWS = 100
"""Most rows of a table on the page; the command beside it gives them all."""

MAX_TEXT = 1000
"""Longest name that is written out; of a longer one the beginning, and how long it is."""

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
        name: Its name in links.
        title: Its heading.
        about: What it tells.
        heads: Name of each column and whether it holds numbers.
        rows: A list of cells for each row: text and what it is sorted by.
        note: What is left out, '' for nothing.
        command: What gives all of it.
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
    """A table of an analysis; columns that hold nothing are left out.

    Args:
        frame: The rows, those that matter first.
        name: Its name in links.
        title: Its heading.
        about: What it tells.
        command: What gives all of it.
        divisor: The number of steps that times are divided by.
        limit: Most rows.
    """
    shown = frame.iloc[:limit]
    columns = [str(one) for one in shown.columns if not _empty(shown[one])]
    numbers = {one: shown[one].dtype.kind in "iufb" or str(shown[one].dtype).startswith("Int") for one in columns}
    cells = [[_cell(one, value, divisor) for value in shown[one].tolist()] for one in columns]
    rest = len(frame) - len(shown)
    return PageTable(
        name=name,
        title=title,
        about=about,
        heads=[(_head(one), numbers[one]) for one in columns],
        rows=[list(row) for row in zip(*cells, strict=True)],
        note=f"{rest:,} more rows are not on the page" if rest else "",
        command=command,
    )


def breakdown_tables(found: BreakdownResult, path: str, limit: int = MAX_TABLE_ROWS) -> list[PageTable]:
    """The tables of a breakdown that hold anything."""
    made = [_steps(found, path, limit)]
    step = found.steps["step"].iloc[found.critical_window] if len(found.steps) else None
    for view, (title, about) in _TITLES.items():
        rows = found.table(view)
        if len(rows):
            of_step = f" of step {step}" if view == "critical-path" and str(step) not in ("None", "<NA>") else ""
            made.append(
                page_table(
                    rows,
                    view,
                    title + of_step,
                    about=f"{about}; milliseconds over all steps that are shown" if not of_step else about,
                    command=f"nvprof-kit breakdown {path} --view {view} --format csv",
                    limit=limit,
                )
            )
    return made


def _steps(found: BreakdownResult, path: str, limit: int) -> PageTable:
    times = [name for name in found.steps.columns if str(name).endswith("_ns") and name != "start_ns"]
    several = [name for name in ("process", "device") if found.steps[name].nunique() > 1]
    rows = found.steps[["step", *several, *times]]
    return page_table(
        rows,
        "breakdown",
        "Breakdown: where each step's time goes",
        about="milliseconds; compute, exposed communication, exposed copies and idle add up to the wall time",
        command=f"nvprof-kit breakdown {path} --format csv",
        limit=limit,
    )


def short_text(text: str) -> str:
    """A text of at most `MAX_TEXT` characters, which says so where it was longer."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def _head(name: str) -> str:
    return name.removesuffix("_ns").replace("_", " ") if name != "bytes" else "MiB"


def _empty(values: pd.Series[Any]) -> bool:
    """Whether a column says nothing: only zeros of time, or nothing at all."""
    if values.isna().all():
        return True
    if str(values.name).endswith("_ns"):
        return bool((values.fillna(0) == 0).all())
    return values.dtype == object and bool((values == "").all())


def _cell(name: str, value: Any, divisor: int) -> tuple[str, Any]:
    """A cell: its text and what it is sorted by."""
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
        return Milliseconds(divisor, 3)(int(value))
    if name == "bytes" or name.endswith("_bytes"):
        return mib(int(value))
    if name in _SHARES:
        return percent(float(value))
    return f"{value:,.1f}" if isinstance(value, float) and math.isfinite(value) else f"{value:,}"
