"""``nvprof-kit flops``: FLOP/s and MFU of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import LINES, rules_option, selecting, steps_options
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._result.selection import Selection


def _peaks(_context: click.Context, _option: click.Parameter, named: tuple[str, ...]) -> dict[str, float]:
    from nvprof_kit._analysis.hardware import parse_peak

    return dict(map(parse_peak, named))


@click.command(short_help="Floating point operations, TFLOP/s and MFU of each layer.")
@reading()
@click.option(
    "--with",
    "counts",
    metavar="FILE",
    help="File written by nvprof_kit.count_flops; default: NAME.flops.json next to the capture NAME.sqlite.",
)
@click.option(
    "--peak",
    "peaks",
    metavar="TYPE=FLOPS",
    multiple=True,
    callback=_peaks,
    help="Peak of the GPU for a data type, in operations per second, such as bf16=989e12. Repeatable.",
)
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model to print; default: all.")
@selecting(top=LINES, fold=True)
@steps_options
@rules_option
def flops(
    request: Reading,
    *,
    counts: str | None,
    peaks: dict[str, float],
    depth: int | None,
    select: Selection,
    steps: StepOptions,
    rules: str | None,
) -> None:
    """Floating point operations, achieved TFLOP/s and model FLOPs utilization (MFU) of each layer.

    A CAPTURE is an nsys .sqlite or .nsys-rep, or a PyTorch trace (.json, .json.gz), each also packed as .xz; the
    operations are counted by nvprof_kit.count_flops in a step of the same program, or derived from the shapes in a
    PyTorch trace. FILE ends in .csv, .json, .md, .parquet or .txt.
    """
    results = each(
        request.captures, lambda one: request.open(one, rules).flops(counts, peaks=peaks, depth=depth, steps=steps)
    )
    request.output.write_results(results, select)
