"""The tables of the page: views of breakdown, and kernels by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._report.page.timeline import Block, Texts
from nvprof_kit._report.text.texts import cell, heading, is_missing, mib_cell

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.breakdown.breakdown import Breakdown


MAX_TABLE_ROWS = 100
"""Maximum number of table rows on the page; a command next to the table shows all."""

MAX_TEXT = 1000
"""Maximum length of a name; longer names are cut and show their length."""

_HEADINGS = {"bytes": "MiB", **{f"{name}_bytes": f"{name} MiB" for name in ("exposed", "wire")}}
_WRITERS = {"_at_ns": lambda ns: f"{ns / 1e6:,.3f}", "bytes": mib_cell}
_TITLES = {
    "idle": ("Idle time by its cause", "why the GPU was idle, and where the host was"),
    "communication": ("Communication", "collectives by layer, and their exposed part"),
    "copies": ("Copies", "copies and memsets by layer"),
    "launches": ("Launches", "where the host cannot launch as fast as the GPU works"),
    "critical-path": ("Critical path", "what determines the length of the median step"),
}


PageTable = dict[str, Any]
"""A table: ``name`` in links, ``title``, ``about``, ``heads`` (name, and whether it is numeric), ``rows`` of cells
(text and sort value), ``note`` about omitted rows, and the ``command`` that shows all."""


def page_table(
    frame: pd.DataFrame, name: str, title: str, *, about: str = "", command: str = "",
    limit: int = MAX_TABLE_ROWS,
) -> PageTable:  # fmt: skip
    """A table of an analysis; empty columns are left out.

    Args:
        frame: The rows, the most important first.
        name: Name in links.
        title: The heading.
        about: A description.
        command: The command that shows the whole table.
        limit: Maximum number of rows.
    """
    printed = frame.iloc[:limit]
    printed = printed.loc[:, printed.notna().any() & ~printed.isin([""]).all()]
    zeros = [name for name in printed.columns if str(name).endswith("_ns") and not printed[name].fillna(0).any()]
    printed = printed.drop(columns=zeros)
    more = len(frame) - len(printed)
    return {
        "name": name,
        "title": title,
        "about": about,
        "heads": [
            (
                heading(str(column), _HEADINGS),
                printed[column].dtype.kind in "iufb" or "Int" in str(printed[column].dtype),
            )
            for column in printed.columns
        ],
        "rows": [
            [
                (
                    short_text(cell(str(name), value, _WRITERS)),
                    "" if isinstance(value, str) or is_missing(value) else value,
                )
                for name, value in row.items()
            ]
            for row in printed.to_dict("records")
        ],
        "note": f"{more:,} more rows are not on the page" if more else "",
        "command": command,
    }


def breakdown_tables(breakdown: Breakdown, path: str, limit: int = MAX_TABLE_ROWS) -> list[PageTable]:
    """The tables of a breakdown that are not empty."""
    times = [name for name in breakdown.steps.columns if str(name).endswith("_ns") and name != "start_ns"]
    several = [name for name in ("process", "device") if breakdown.steps[name].nunique() > 1]
    tables = [
        page_table(
            breakdown.steps[["step", *several, *times]],
            "breakdown",
            "Breakdown: where each step's time goes",
            about="milliseconds; compute, exposed communication, exposed copies and idle add up to the wall time",
            command=f"nvprof-kit breakdown {path} --format csv",
            limit=limit,
        )
    ]
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


def short_text(text: str) -> str:
    """A text cut to `MAX_TEXT` characters, with its length if it was longer."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


MAX_KERNELS = 20_000
"""Maximum number of rows of all captures on a page; the costliest are kept."""


def kernel_table(operations: Operations, is_counted: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """The operations by name, layer and phase.

    Args:
        operations: The operations, with names.
        is_counted: Which operations count.

    Returns:
        name, kernel_class, layer, phase, calls, total_ns, min_ns, max_ns; the costliest first.
    """
    import pandas as pd

    ops = operations.trace.ops
    layer, phase = op_owners(operations.attribution)
    classes = pd.Categorical.from_codes(operations.classes.code, pd.Index(list(CLASSES)))
    columns = {"name": ops["name"].array, "kernel_class": classes, "layer": layer, "phase": phase}
    frame = pd.DataFrame({**columns, "ns": (ops["end_ns"] - ops["start_ns"]).to_numpy()})[is_counted]
    amounts = {"calls": ("ns", "size"), "total_ns": ("ns", "sum"), "min_ns": ("ns", "min"), "max_ns": ("ns", "max")}
    rows = frame.groupby(list(columns), sort=False, observed=True, as_index=False).agg(**amounts)
    kernels: pd.DataFrame = rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)
    return kernels


def drawn_kernels(table: pd.DataFrame, texts: Texts, block: Block, limit: int = MAX_KERNELS) -> dict[str, Any]:
    """The table as columns of a block, and a sentence about omissions."""
    rows, omitted = table.iloc[:limit], table.iloc[limit:]
    gone = omitted["total_ns"].sum() / max(int(table["total_ns"].sum()), 1)
    note = f"{len(omitted):,} more rows, {100 * gone:.2f} % of the time, are not on the page" if len(omitted) else ""
    columns = {name: block.add(texts.of(rows[name])) for name in ("name", "kernel_class", "layer", "phase")}
    columns |= {name: block.add(rows[f"{name}_ns"]) for name in ("total", "min", "max")}
    return {**columns, "calls": block.add(rows["calls"]), "whole": int(table["total_ns"].sum()), "note": note}
