"""``nvprof-kit ncu``: hardware counters per layer, and a plan of the kernels to measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvprof_kit._capture.ncu_script import SETS
from nvprof_kit._cli.inputs import LINES, Number, row_options, rules_option
from nvprof_kit._cli.output import Output, domain_option, named_domain, reading, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit._result import formats
from nvprof_kit._result.result import TABLE
from nvprof_kit._trace.files.kinds import NCU, NEEDED_NSYS, NSYS, expect
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._api.capture import Capture
    from nvprof_kit._result.result import Result

_NEEDED = "a raw or details page of ncu as .csv, or an .ncu-rep, each also packed as .xz"


@click.group(short_help="Hardware counters of each layer, from Nsight Compute (ncu).")
def ncu() -> None:
    """Hardware counters of each layer, from Nsight Compute (ncu).

    `plan` chooses kernels to measure from an nsys capture; `layers` shows the results per layer; `kernels` shows all
    metrics of all measured kernels.
    """


@reading("Choose the kernels to measure.", nsys=True)
@click.option(
    "--share",
    type=Number(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Fraction of the GPU time that the measured kernels represent; with counts, of that above the least time.",
)
@click.option(
    "--layer", default="", metavar="PATH", help="Only this layer and the layers inside it, such as model.layers.3."
)
@click.option("--phase", default="", help="Only this phase, such as forward, backward or optimizer.")
@click.option("--every-layer", is_flag=True, help="Reach the share in each block of the model, not only overall.")
@click.option(
    "--set",
    type=click.Choice(SETS),
    default="basic",
    show_default=True,
    help="Section set of ncu.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="In a multi-rank program, the rank to measure; the launcher starts the script on each rank.",
)
@click.option(
    "--memory-gb",
    type=Number(min=0),
    default=1.0,
    show_default=True,
    help="GPU memory of the program, which ncu saves and restores; used to predict the run time.",
)
@click.option(
    "--script", type=click.Path(path_type=Path), metavar="FILE", help="Write the script that measures the kernels."
)
@row_options(LINES, where=False)
def plan(capture: Capture, script: Path | None, **options: Any) -> Result:
    """Choose the fewest kernel launches that represent most of the GPU time of a CAPTURE, and write a script that
    measures only those with ncu.

    Then: bash FILE -- python train.py, and nvprof-kit ncu layers plan.csv --capture CAPTURE. In a multi-rank program
    one rank is measured: --rank 0, then torchrun --nproc-per-node 8 --no-python bash FILE -- python train.py. Kernels
    of collectives are left out, because ncu cannot replay them on a single rank.
    """
    captures = click.get_current_context().params["captures"]
    if len(captures) > 1:
        raise UsageError(f"a plan needs one capture, not {len(captures)}")
    if script is not None:
        Output(TABLE, script).spare(captures)
    return capture.ncu_plan(script=script, **options)


ncu.add_command(plan)


@ncu.command(short_help="Hardware utilization of each layer.")
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True)
@click.option(
    "--capture",
    metavar="CAPTURE",
    help="nsys capture of the same program; measured kernels then represent all their launches.",
)
@domain_option
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model to print; default: all.")
@row_options(LINES, fold=True)
@rules_option
@writing()
def layers(
    output: Output, reports: tuple[str, ...], capture: str | None, domain: str, rules: str | None, **options: Any
) -> None:
    """Hardware utilization of each layer: compute, memory and Tensor Core throughput, and what limits it.

    A REPORT is an .ncu-rep, or ncu's raw or details page as .csv, each also packed as .xz; several are combined.
    FILE ends in .csv, .json, .md, .parquet or .txt for the table, in .png, .svg or .pdf for a roofline.
    """
    from nvprof_kit._api.sources import open_ncu

    output.spare([*reports, *([capture] if capture else [])])
    for report in reports:
        expect(report, NCU, _NEEDED)
    if capture is not None:
        expect(capture, NSYS, NEEDED_NSYS)
    with progress() as say:
        say(f"reading {', '.join(reports)}")
        result = open_ncu(*reports, rules=rules, domain=named_domain(domain)).layers(capture, **options)
    output.write_results([result])


@ncu.command(short_help="All metrics of each measured kernel.")
@click.argument("report", metavar="REPORT")
@domain_option
@row_options()
@writing()
def kernels(output: Output, report: str, domain: str, **options: Any) -> None:
    """All metrics of all measured kernels, one row per kernel, with layer and phase, in base units: ns, byte, hz, %.

    A REPORT is ncu's raw or details page as .csv, or an .ncu-rep, each also packed as .xz.
    """
    from nvprof_kit._api.sources import open_ncu

    if output.form in formats.PICTURES:
        raise UsageError("a plot of kernels is the roofline: nvprof-kit ncu layers REPORT -o roofline.png")
    output.spare([report])
    expect(report, NCU, _NEEDED)
    with progress() as say:
        say(f"reading {report}")
        measured = open_ncu(report, domain=domain).kernels(**options)
    replace(output, form="csv" if output.form == TABLE else output.form).write_results([measured])
