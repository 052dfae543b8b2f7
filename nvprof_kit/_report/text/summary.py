"""Text report of the eight summary views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.text.shorten import kernel_names
from nvprof_kit._report.text.table import capture_line, frame_table, warning_lines
from nvprof_kit._report.text.units import heading, mb_cell

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.summary.summary import Summary

_RANKS = {"calls": 0, "GPU total": 0, "CPU total": 0, "wall": 0, "family": 4, "class": 3}
_WRITERS = {"bytes": lambda count: text if (text := mb_cell(count)).endswith("B") else f"{text} MB"}


def summary_report(result: Summary) -> list[RenderableType]:
    """The views one below the other, each with its note and its first rows."""
    top = result.select.top or 12
    parts: list[RenderableType] = [capture_line(result.info, result.steps), ""]
    on_gpu = result.info.on_gpu
    for name, rows in result.views.items():
        title = "Kernel: operators by their own time" if name == "kernel" and not on_gpu else name.capitalize()
        parts += [
            Text(title, "bold"),
            *([_table(rows, top, on_gpu)] if len(rows) else []),
            Text(result.notes[name], "dim"),
            "",
        ]
    return [*parts, Text("Milliseconds.", "dim"), *warning_lines(result.warnings), ""]


def _table(rows: pd.DataFrame, top: int, on_gpu: bool) -> RenderableType:
    printed = _readable(rows.head(top)) if on_gpu else rows.head(top)
    printed = printed[[name for name in printed.columns if not _left_out(str(name), printed)]]
    headings = {"kernel_class": "class"}
    if not on_gpu:
        own = {str(name): heading(str(name).removeprefix("gpu_")) for name in printed.columns}
        headings |= own | {"gpu_ops": "operators"}
    return frame_table(printed, len(rows) - top, headings=headings, writers=_WRITERS, ranks=_RANKS)


def _readable(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with short kernel names; kernels of an operator are indented below it."""
    readable = rows
    if "kernel_class" in rows:
        readable = rows.assign(name=rows["name"].map(kernel_names(rows["name"].astype(str))))
    elif "operator" in rows:
        operators = rows["operator"].astype(str).str.replace("autograd::engine::evaluate_function:", "engine:")
        kernels = "  " + rows["kernel"].map(kernel_names(rows["kernel"].astype(str)))
        readable = rows.assign(operator=operators.where(rows["kernel"] == "", kernels)).drop(columns="kernel")
    return readable


def _left_out(name: str, rows: pd.DataFrame) -> bool:
    """Whether to omit a column: empty or a detail; CSV has all columns."""
    single = "gpu_p50_ns" in rows
    detail = single and name in ("gpu_min_ns", "gpu_p50_ns", "cpu_avg_ns", "cpu_max_ns", "cpu_min_ns", "cpu_ratio")
    detail |= name in ("cpu_p50_ns", "cpu_p95_ns")
    detail |= name in ("process", "device", "kernel") and not (rows[name].notna() & (rows[name] != "")).any()
    return detail or (name.startswith(("cpu_", "gpu_")) and not rows[name].any())
