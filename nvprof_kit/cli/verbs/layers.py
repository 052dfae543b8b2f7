"""``nvprof-kit layers``: what each layer costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import domain_for, rules_option
from nvprof_kit.cli.output import Output, Reading, reading
from nvprof_kit.cli.progress import each
from nvprof_kit.errors import UsageError
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules
    from nvprof_kit.analysis.layers.layers import LayersResult


@click.command(short_help="What each layer costs.")
@reading
@click.option("--by", type=click.Choice(["step"]), help="A row, in the table a column, for each step.")
@click.option(
    "--depth", type=click.IntRange(min=1), help="Levels of the model in the table and the plot; default: all."
)
@click.option("--memory", is_flag=True, help="The memory of each layer beside its time, where the capture tells it.")
@rules_option
def layers(asked: Reading, by: str | None, depth: int | None, memory: bool, rules: Rules | None) -> None:
    """What each layer costs, forward and backward, and what lies outside every layer.

    A CAPTURE is an nsys .sqlite or .nsys-rep, or a PyTorch trace (.json, .json.gz), each also packed as .xz. FILE ends
    in .csv, .json, .md, .parquet or .txt for the table, in .png, .svg or .pdf for a plot.
    """
    if asked.output.form in plots.FORMATS and len(asked.captures) > 1:
        raise UsageError(f"a plot shows one capture, not {len(asked.captures)}; plot them one by one")

    from nvprof_kit.analysis.layers.layers import LayersOptions
    from nvprof_kit.analysis.layers.layers import layers as analyse
    from nvprof_kit.trace.open import open_capture
    from nvprof_kit.trace.schema import MEMORY_TABLES

    options = LayersOptions(by_step=by == "step", rules=rules, memory=memory)
    domain = domain_for(asked.domain, rules)
    optional = MEMORY_TABLES if memory else ()
    results = each(asked.captures, lambda one: analyse(open_capture(one, domain=domain, optional=optional), options))
    _write(results, asked.output, depth)


def _write(results: list[LayersResult], output: Output, depth: int | None) -> None:
    if output.form in tables.FORMATS:
        output.write_tables([(result.info.path, result.rows, result.warnings) for result in results])
    elif output.form in plots.FORMATS:
        from nvprof_kit.report.plots.layers import layers_figure

        output.write(plots.encode(layers_figure(results[0], depth), output.form), results[0].warnings)
    else:
        _print(results, output, depth)


def _print(results: list[LayersResult], output: Output, depth: int | None) -> None:
    from nvprof_kit.report.text.layers import LayersView, layers_report
    from nvprof_kit.report.text.layers_by_step import layers_by_step_report

    reports = [
        (layers_by_step_report if "step" in result.rows else layers_report)(result, LayersView(depth=depth))
        for result in results
    ]
    output.print(part for number, report in enumerate(reports) for part in ([""] if number else []) + report)
