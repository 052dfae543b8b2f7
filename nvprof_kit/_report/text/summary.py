"""Text report of the eight summary views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.text.shorten import kernel_names
from nvprof_kit._report.text.table import capture_line, table, warning_lines
from nvprof_kit._report.text.units import Cells, mb_cell, percent, rate_cell

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.summary.summary import Summary

_MS = Cells(1, 3)


def summary_report(result: Summary) -> list[RenderableType]:
    """The views one below the other, each with its note and its first rows."""
    top = result.select.top or 12
    parts: list[RenderableType] = [capture_line(result.info, result.steps), ""]
    on_gpu = result.info.on_gpu
    for name, rows in result.views.items():
        title = "Kernel: operators by their own time" if name == "kernel" and not on_gpu else name.capitalize()
        parts += [
            Text(title, "bold"),
            *(
                [_table(_readable(rows.head(top)) if on_gpu else rows.head(top), len(rows) - top, on_gpu)]
                if len(rows)
                else []
            ),
            Text(result.notes[name], "dim"),
            "",
        ]
    return [*parts, Text("Milliseconds.", "dim"), *warning_lines(result.warnings), ""]


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


def _table(rows: pd.DataFrame, more: int, on_gpu: bool) -> RenderableType:
    columns = [str(name) for name in rows.columns if not _left_out(str(name), rows)]
    kinds = [(_heading(name, on_gpu), "right" if rows[name].dtype.kind in "iuf" else "left") for name in columns]
    grid = table(kinds, {"calls": 0, "GPU total": 0, "CPU total": 0, "wall": 0, "family": 4, "class": 3})
    grid.beyond, grid.hidden_note = max(more, 0), "… and {} more; --top shows them, csv has them all"
    for row in rows[columns].to_dict("records"):
        grid.add_row(*(_cell(str(name), value) for name, value in row.items()))
    return grid


def _left_out(name: str, rows: pd.DataFrame) -> bool:
    """Whether to omit a column: empty or a detail; CSV has all columns."""
    single = "gpu_p50_ns" in rows
    detail = single and name in ("gpu_min_ns", "gpu_p50_ns", "cpu_avg_ns", "cpu_max_ns", "cpu_min_ns", "cpu_ratio")
    detail |= name in ("cpu_p50_ns", "cpu_p95_ns")
    detail |= name in ("process", "device", "kernel") and not (rows[name].notna() & (rows[name] != "")).any()
    return detail or (name.startswith(("cpu_", "gpu_")) and not rows[name].any())


def _heading(name: str, on_gpu: bool) -> str:
    if not on_gpu:
        name = {"gpu_ops": "operators"}.get(name, name.removeprefix("gpu_"))
    return {"gb_per_s": "GB/s", "kernel_class": "class"}.get(
        name, name.removesuffix("_ns").replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU")
    )


def _cell(name: str, value: Any) -> str:
    if value is None or str(value) in ("<NA>", "nan"):
        return ""
    if name.endswith("_ns"):
        return _MS(int(value))
    if name.endswith("ratio") or name == "utilisation":
        return percent(value)
    if name == "bytes":
        text = mb_cell(value)
        return text if text.endswith("B") else f"{text} MB"
    if isinstance(value, float):
        number = f"{int(value):,}" if value == int(value) else f"{value:,.1f}"
        return rate_cell(value) if name == "gb_per_s" and value != int(value) else number
    return f"{value:,}" if isinstance(value, int) else str(value)
