"""``nvprof-kit metrics``: GPU metrics of each layer, from nsys's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import opened, rules_option
from nvprof_kit.cli.output import Reading, reading
from nvprof_kit.cli.progress import each
from nvprof_kit.errors import UsageError
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules


@click.command(short_help="GPU metrics of each layer, as nsys sampled them.")
@reading
@click.option(
    "--floor",
    type=click.FloatRange(min=1),
    default=20.0,
    show_default=True,
    help="Samples below which a layer has no figures.",
)
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model in the table; default: all.")
@rules_option
def metrics(asked: Reading, floor: float, depth: int | None, rules: Rules | None) -> None:
    """How busy each layer keeps SMs, tensor cores, DRAM, NVLink and PCIe, from the GPU metrics that nsys sampled.

    A CAPTURE is an nsys .sqlite or .nsys-rep recorded with --gpu-metrics-device, also packed as .xz. FILE ends in .csv,
    .json, .md, .parquet or .txt.
    """
    from nvprof_kit.analysis.metrics import MetricsOptions
    from nvprof_kit.analysis.metrics import metrics as analyse

    if asked.output.form in plots.FORMATS:
        raise UsageError("metrics are a table; -o FILE ends in .csv, .json, .md, .parquet or .txt")
    options = MetricsOptions(floor)
    results = each(asked.captures, lambda one: analyse(opened(one, asked.domain, rules, ("samples",)), options))
    if asked.output.form in tables.FORMATS:
        asked.output.write_tables([(result.info.path, result.rows, result.info.warnings) for result in results])
        return
    from nvprof_kit.report.text.metrics import metrics_report

    asked.output.print(part for result in results for part in metrics_report(result, depth))
