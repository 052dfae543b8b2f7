"""Text report of the per-layer table with a column per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._report.text.layers import LayersView, header, layers_report, line_label, time_name
from nvprof_kit._report.text.table.terminal import table, warning_lines
from nvprof_kit._report.text.table.units import Cells
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.layers.layers import Layers

MAX_STEPS = 8
"""Maximum number of steps with a column; data formats contain all steps."""

OUTSIDE = "outside"
"""Header of the column for work outside steps."""


def report(result: Layers) -> list[RenderableType]:
    """The tree of the model with times, or with a column per step if the rows are by step."""
    view = LayersView(result.depth, result.select)
    return layers_by_step_report(result, view) if "step" in result.rows else layers_report(result, view)


def layers_by_step_report(result: Layers, view: LayersView) -> list[RenderableType]:
    """The report of a result by step."""
    return [*header(result), "", *steps_table(result, view), *warning_lines(result.warnings)]


def steps_table(result: Layers, view: LayersView) -> list[RenderableType]:
    """The table with a description of its figures."""
    times = layers_by_step(result)
    columns = list(times.columns[:MAX_STEPS])
    number = dict(zip(result.rows["instance"], result.rows["step"], strict=True))
    heads = (name if name == OUTSIDE else f"step {number[name]}" for name in columns)
    made = table([("layer", "path"), *((head, "right") for head in heads)])
    made.choose(view.select)
    ms = Cells.for_total(int(times.to_numpy()[-1].max(initial=0)))
    by_row = times[columns].iloc[:-1].reset_index(drop=True).set_axis(result.tree.index)
    for row in view.tree(result, by_row.rename(columns={name: f"in {name}" for name in columns})).to_dict("records"):
        cells = [ms(row[f"in {name}"]) for name in columns]
        style = "dim" if row["layer"] == NO_LAYER else ""
        made.add_row(line_label(row, view.flat), *cells, style=style, cost=row["total_ns"])
    made.add_section()
    made.add_row("total", *map(ms, times[columns].to_numpy()[-1].tolist()), style="bold")
    what = f"Milliseconds of {time_name(result)} in each step, all phases together, including nested layers."
    if (left_out := len(times.columns) - MAX_STEPS) > 0:
        what += f" {left_out} more columns are left out here; -o FILE.csv has all steps."
    return [made, "", Text(what, "dim")]


def layers_by_step(result: Layers) -> pd.DataFrame:
    """Time of each row of the tree by step, in ns, including nested layers, with the sum as the last row.

    Returns:
        A column for each step instance in order, then `OUTSIDE` if there is work outside steps; an int64 row for each
        row of `Layers.tree`, in its order, and one for the total.
    """
    rows, tree = result.rows, result.tree
    pairs = zip(rows["instance"], rows["instance"].isna(), strict=True)
    steps = [OUTSIDE if missing else int(instance) for instance, missing in pairs]
    row_keys = rows["layer"].where(rows["layer"] != NO_LAYER, NO_LAYER + rows["phase"])
    own = rows["gpu_self_ns"].groupby([row_keys, steps]).sum().unstack(fill_value=0).astype("int64")
    own = own[[*sorted(name for name in own if name != OUTSIDE), *(name for name in own if name == OUTSIDE)]]
    keys = tree["layer"].where(tree["layer"] != NO_LAYER, NO_LAYER + tree["phase"]).tolist()
    times: pd.DataFrame = own.reindex(keys, fill_value=0)
    times[:] = ModelTree.of_rows(tree["layer"], tree["parent"]).with_nested(times.to_numpy())
    top = (tree["depth"] == 0).to_numpy()
    times.loc["total"] = times[top].sum()
    return times
