"""``nvprof-kit metrics``: GPU metrics of each layer, from nsys samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import LINES, Number, rules_option, selecting, steps_options
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._result.selection import Selection


@click.command(short_help="GPU Metrics of each layer, sampled by nsys.")
@reading(nsys=True)
@click.option(
    "--floor",
    type=Number(min=1),
    default=20.0,
    show_default=True,
    help="Minimum samples; a layer with fewer has no figures.",
)
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model to print; default: all.")
@selecting(top=LINES, fold=True)
@steps_options
@rules_option
def metrics(
    request: Reading, *, floor: float, depth: int | None, select: Selection, steps: StepOptions, rules: str | None
) -> None:
    """How busy each layer keeps SMs, Tensor Cores, DRAM, NVLink and PCIe, from nsys GPU Metrics samples.

    A CAPTURE is an nsys .sqlite or .nsys-rep recorded with --gpu-metrics-device, also packed as .xz. FILE ends in .csv,
    .json, .md, .parquet or .txt.
    """
    results = each(
        request.captures, lambda one: request.open(one, rules).metrics(floor=floor, depth=depth, steps=steps)
    )
    request.output.write_results(results, select)
