"""``nvprof-kit flops``: what each layer gets out of the GPU."""

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
    from nvprof_kit.analysis.flops.flops import FlopsResult
    from nvprof_kit.analysis.foreign.rules import Rules


def _peaks(_context: click.Context, _option: click.Parameter, named: tuple[str, ...]) -> dict[str, float]:
    from nvprof_kit.analysis.hardware import parse_peak

    return dict(map(parse_peak, named))


@click.command(short_help="Floating point operations, TFLOP/s and MFU of each layer.")
@reading
@click.option(
    "--with",
    "counts",
    metavar="FILE",
    help="What nvprof_kit.count_flops wrote; by default NAME.flops.json beside the capture NAME.sqlite.",
)
@click.option(
    "--peak",
    "peaks",
    metavar="TYPE=FLOPS",
    multiple=True,
    callback=_peaks,
    help="Peak of the GPU for a type of number, in operations a second, as in bf16=989e12; may be given again.",
)
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model in the table; default: all.")
@rules_option
def flops(asked: Reading, counts: str | None, peaks: dict[str, float], depth: int | None, rules: Rules | None) -> None:
    """Floating point operations of each layer, what it gets out of the GPU, and what part of the peak that is (MFU).

    A CAPTURE is an nsys .sqlite or .nsys-rep, or a PyTorch trace (.json, .json.gz), each also packed as .xz; the
    operations were counted by nvprof_kit.count_flops in a step of the same program. FILE ends in .csv, .json, .md,
    .parquet or .txt.
    """
    if asked.output.form in plots.FORMATS:
        raise UsageError("operations are a table; -o FILE ends in .csv, .json, .md, .parquet or .txt")

    from nvprof_kit.analysis.flops.flops import FlopsOptions
    from nvprof_kit.analysis.flops.flops import flops as analyse
    from nvprof_kit.trace.flops_file import flops_beside, flops_of_rank, read_flops

    def join(capture: str) -> FlopsResult:
        file = flops_beside(capture) if counts is None else flops_of_rank(counts, capture)
        counted = read_flops(file)  # first: it tells of a mistake at once
        return analyse(opened(capture, asked.domain, rules, ("name",)), counted, FlopsOptions(peaks))

    results = each(asked.captures, join)
    if asked.output.form in tables.FORMATS:
        asked.output.write_tables([(result.info.path, result.rows, result.warnings) for result in results])
        return
    from nvprof_kit.report.text.flops import flops_report

    reports = [flops_report(result, depth) for result in results]
    asked.output.print(part for number, report in enumerate(reports) for part in ([""] if number else []) + report)
