"""``nvprof-kit ncu``: hardware counters per layer, and which kernels to measure for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nvprof_kit._capture.ncu_script import SETS
from nvprof_kit._cli.inputs import LINES, rules_option, selecting
from nvprof_kit._cli.output import NEEDED_NSYS, Output, Reading, named_domain, reading, writing
from nvprof_kit._cli.progress import each, progress
from nvprof_kit._report.plots import plots
from nvprof_kit._report.selection import Selection
from nvprof_kit._results.base import TABLE
from nvprof_kit._trace.files.kinds import NCU, NSYS, expect
from nvprof_kit.errors import UsageError
from nvprof_kit.names import DOMAIN

_NEEDED = "a raw or details page of ncu as .csv, or an .ncu-rep, each also packed as .xz"
_DOMAIN = click.option(
    "--domain",
    default=DOMAIN,
    show_default=True,
    help="NVTX domain of the ranges; '' or default is the default domain.",
)


@click.group(short_help="Hardware counters of each layer, from Nsight Compute.")
def ncu() -> None:
    """Hardware counters of each layer, from Nsight Compute (ncu).

    `plan` chooses the kernels to measure, from an nsys capture; `layers` tells what was measured, layer by layer;
    `kernels` gives every metric of every measured kernel.
    """


@ncu.command(short_help="Which kernels to measure.")
@reading(nsys=True)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="How much of the GPU time the measured kernels are to stand for.",
)
@click.option("--layer", default="", metavar="PATH", help="Only this layer and those in it: model.layers.3.")
@click.option("--phase", default="", help="Only this phase: forward, backward, optimizer.")
@click.option("--every-layer", is_flag=True, help="Reach the share in every block of the model, not only over all.")
@click.option(
    "--set",
    "section_set",
    type=click.Choice(SETS),
    default="basic",
    show_default=True,
    help="ncu's set of sections.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Of a program of several ranks measure this one: the launcher starts the script on each rank.",
)
@click.option(
    "--memory-gb",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="GPU memory of the program, which ncu saves and restores; for the prediction of time.",
)
@click.option("--script", type=click.Path(path_type=Path), metavar="FILE", help="Write the script that measures them.")
@selecting(where=False, top=LINES)
@rules_option
def plan(asked: Reading, select: Selection, script: Path | None, rules: str | None, **options: Any) -> None:
    """Choose the fewest kernels that stand for most of the GPU time of a CAPTURE, and write the script that measures
    just those with ncu, one launch of each.

    Then: bash FILE -- python train.py, and nvprof-kit ncu layers plan.csv --with CAPTURE. Of several ranks one is
    measured: --rank 0, then torchrun --nproc-per-node 8 --no-python bash FILE -- python train.py. Kernels of
    collectives are left out, since ncu cannot replay them on one rank alone.
    """
    if len(asked.captures) > 1:
        raise UsageError(f"a plan is for one capture, not {len(asked.captures)}")
    if script is not None:
        Output(TABLE, script).spare(asked.captures)
    (made,) = each(asked.captures, lambda one: asked.open(one, rules).ncu_plan(**options))
    if script is not None:
        made.save_script(script)
    asked.output.write_results([made], select)


@ncu.command(short_help="What each layer did to the GPU.")
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True)
@click.option("--with", "capture", metavar="CAPTURE", help="nsys capture of the same program to spread it over.")
@_DOMAIN
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model in the table; default: all.")
@selecting(top=LINES)
@rules_option
@writing()
def layers(
    output: Output, reports: tuple[str, ...], depth: int | None, select: Selection, rules: str | None, **source: Any
) -> None:
    """What each layer did to the GPU: how busy it kept compute, memory and tensor cores, and what bound it.

    A REPORT is ncu's raw or details page as .csv, or an .ncu-rep, each also packed as .xz; several are taken together.
    FILE ends in .csv, .json, .md, .parquet or .txt for the table, in .png, .svg or .pdf for a roofline.
    """
    from nvprof_kit._api.sources import open_ncu

    capture = source["capture"]
    output.spare([*reports, *([capture] if capture else [])])
    for report in reports:
        expect(report, NCU, _NEEDED)
    if capture is not None:
        expect(capture, NSYS, NEEDED_NSYS)
    with progress() as say:
        say(f"reading {', '.join(reports)}")
        result = open_ncu(*reports, rules=rules, domain=named_domain(source["domain"])).layers(capture, depth=depth)
    output.write_results([result], select)


@ncu.command(short_help="What each measured kernel did.")
@click.argument("report", metavar="REPORT")
@_DOMAIN
@selecting()
@writing()
def kernels(output: Output, report: str, domain: str, select: Selection) -> None:
    """Every metric of every measured kernel, a row each, with its layer and phase; in base units: ns, byte, hz, %.

    A REPORT is ncu's raw or details page as .csv, or an .ncu-rep, each also packed as .xz.
    """
    from nvprof_kit._api.sources import open_ncu

    if output.form in plots.FORMATS:
        raise UsageError("a plot of kernels is the roofline: nvprof-kit ncu layers REPORT -o roofline.png")
    output.spare([report])
    expect(report, NCU, _NEEDED)
    (measured,) = each([report], lambda one: open_ncu(one, domain=domain).kernels())
    replace(output, form="csv" if output.form == TABLE else output.form).write_results([measured], select)
