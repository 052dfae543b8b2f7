"""Where the time of a step goes, as a person reads it: a line per step, then why, where, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit.analysis.idle import CAUSES
from nvprof_kit.report.terminal import capture_line, doubt_lines, table
from nvprof_kit.report.units import Milliseconds, percent

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit.analysis.breakdown import BreakdownResult

_MS = Milliseconds(1, 3)
_NUMBERS: dict[str, Callable[[Any], str]] = {
    "share": percent,
    "hidden": percent,
    "gb_per_s": lambda value: f"{value:,.1f}",
    "bytes": lambda value: f"{value / 1e6:,.1f} MB",
    "launch_bound": lambda value: "yes" if value else "",
    "delay_ns": lambda value: f"{value / 1000:,.1f} µs",
}
_TITLES = {
    "idle": "Idle, by cause and by where the launching thread was when it began",
    "communication": "Communication",
    "copies": "Copies",
    "launches": "Launches",
    "critical-path": "Critical path of {step}",
}


def breakdown_report(result: BreakdownResult, view: str | None, top: int) -> list[RenderableType]:
    """The report: which capture, where each step's time goes, and the tables that say why.

    Args:
        result: The breakdown.
        view: One table alone, None for all that hold something.
        top: Lines of each table.
    """
    steps = int(result.steps["step"].dropna().nunique())
    parts: list[RenderableType] = [capture_line(result.info, steps), ""]
    if view in (None, "steps"):
        parts += [_steps(result.steps, top), *_causes(result.steps), ""]
    for name, title in _TITLES.items():
        rows = result.table(name)
        if view == name or (view is None and len(rows)):
            heading = title.format(step=_step_name(result.steps.iloc[result.critical_window]))
            parts += [Text(heading, "bold"), _plain(rows.head(top)), *_rest(len(rows) - top), ""]
    note = "Milliseconds; compute, exposed communication, exposed copies and idle add up to wall."
    return [*parts, Text(note, "dim"), *doubt_lines(result.doubts)]


def _steps(steps: pd.DataFrame, top: int) -> RenderableType:
    """A line per step and device, the longest first where there are many, and a line for all."""
    several = steps[["process", "device"]].drop_duplicates().shape[0] > 1
    names = ["wall", "compute", "exposed comm", "exposed copy", "idle"]
    made = table([("step", "left"), *([("GPU", "left")] if several else []), *((name, "right") for name in names)])
    shown = steps if len(steps) <= top else steps.nlargest(top, "wall_ns")
    for row in shown.to_dict("records"):
        made.add_row(_step_name(row), *([f"{row['process']}:{row['device']}"] if several else []), *_parts(row))
    made.add_section()
    label = f"all {len(steps)}" if len(steps) > len(shown) else "all"
    made.add_row(label, *([""] if several else []), *_parts(steps.select_dtypes("number").sum()), style="bold")
    return made


def _step_name(row: Any) -> str:
    return "outside steps" if _missing(row["step"]) else f"step {int(row['step'])}"


def _missing(value: Any) -> bool:
    return value is None or str(value) in ("<NA>", "nan")


def _parts(row: Any) -> list[str]:
    wall = row["wall_ns"]
    cells = [_MS(int(wall))]
    for name in ("compute", "exposed_comm", "exposed_copy", "idle"):
        spent = int(row[f"{name}_ns"])
        cells.append(f"{_MS(spent)} {percent(spent / wall):>7}" if spent and wall else "")
    return cells


def _causes(steps: pd.DataFrame) -> list[RenderableType]:
    """What the idle time is, a line for each cause that there is."""
    idle = int(steps["idle_ns"].sum())
    found = sorted(((int(steps[f"idle_{cause}_ns"].sum()), cause) for cause in CAUSES), reverse=True)
    lines = [Text(f"  {percent(ns / idle):>7}  {cause}: {CAUSES[cause]}") for ns, cause in found if ns and idle]
    return ["", Text("Idle:", "bold"), *lines] if lines else []


def _plain(rows: pd.DataFrame) -> RenderableType:
    """A table of the analysis with its times as milliseconds."""
    kinds = [(_heading(name), "left" if rows[name].dtype.kind not in "iufb" else "right") for name in rows.columns]
    made = table(kinds)
    for row in rows.to_dict("records"):
        made.add_row(*(_cell(name, value) for name, value in row.items()))
    return made


def _heading(name: Any) -> str:
    return {"gb_per_s": "GB/s"}.get(name, str(name).removesuffix("_ns").replace("_", " "))


def _cell(name: Any, value: Any) -> str:
    if _missing(value):
        return ""
    if name in _NUMBERS:
        return _NUMBERS[name](value)
    if name == "longest_at_ns":
        return f"{value / 1e9:.6f} s"
    if str(name).endswith("_ns"):
        return _MS(int(value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rest(more: int) -> Sequence[RenderableType]:
    return [Text(f"… and {more} more; --top shows them, csv has them all", "dim")] if more > 0 else []
