"""``nvprof-kit layers``: GPU and CPU time of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from nvprof_kit._cli.inputs import LINES, rules_option, selecting, steps_options
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each
from nvprof_kit._result import formats
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._result.selection import Selection


@click.command(short_help="GPU and CPU time of each layer.")
@reading(plot=True)
@click.option("--by", type=click.Choice(["step"]), help="One row per step (in the printed table, one column).")
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model to print and plot; default: all.")
@click.option(
    "--memory", is_flag=True, help="Add the memory of each layer; needs a capture with memory marks or events."
)
@selecting(top=LINES, fold=True)
@click.option(
    "--columns",
    "splits",
    multiple=True,
    type=click.Choice(["class", "phase"]),
    help="Add columns that split the time by kernel class or by phase of the loop (prefill, decode). Repeatable.",
)
@steps_options
@rules_option
def layers(
    request: Reading,
    *,
    by: str | None,
    depth: int | None,
    memory: bool,
    select: Selection,
    splits: tuple[Literal["class", "phase"], ...],
    steps: StepOptions,
    rules: str | None,
) -> None:
    """GPU and CPU time of each layer by phase, and the time outside all layers.

    A CAPTURE is an nsys .sqlite or .nsys-rep, or a PyTorch trace (.json, .json.gz), each also packed as .xz. FILE ends
    in .csv, .json, .md, .parquet or .txt for the table, in .png, .svg or .pdf for a plot.
    """
    if request.output.form in formats.PICTURES and len(request.captures) > 1:
        raise UsageError(f"a plot shows one capture, not {len(request.captures)}; plot them one by one")
    options: dict[str, Any] = {
        "by_step": by == "step",
        "memory": memory,
        "depth": depth,
        "steps": steps,
        "splits": splits,
    }
    results = each(
        request.captures,
        lambda one: request.open(one, rules).layers(**options),
    )
    request.output.write_results(results, select)
