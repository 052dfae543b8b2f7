"""``nvprof-kit ncu profile``: hardware counters of a layer, of selected kernels, or for a roofline."""

from __future__ import annotations

from typing import Any

import click

from nvprof_kit._cli.verbs.capture.capturing import COUNT, force_option, free_option


@click.command("profile", context_settings={"allow_interspersed_args": False})
@click.option("--roofline", is_flag=True, help="What a roofline needs, of one --layer or of every launch.")
@click.option("-l", "--layer", metavar="LAYER", help="The layer's path, as nvprof-kit layers prints it.")
@click.option(
    "-p",
    "--phase",
    type=click.Choice(["forward", "backward", "recompute"]),
    help="Phase of the layer. [default: forward]",
)
@click.option(
    "--domain", metavar="NAME", help="NVTX domain of the ranges; '' is the default domain. [default: nvprof_kit]"
)
@click.option(
    "-k",
    "--kernel",
    "kernels",
    metavar="NAME",
    multiple=True,
    help="A regular expression for the function's name, without parameters. Repeatable.",
)
@click.option(
    "--each",
    is_flag=True,
    help="The first launch of every grid, block and shared memory that the kernel comes with, instead of --count.",
)
@click.option(
    "-c", "--capture", metavar="FILE", help="An nsys capture of the program, whose costliest kernels are measured."
)
@click.option("--top", metavar="N", type=COUNT, help="With --capture: how many kernels. [default: 10]")
@click.option(
    "-s",
    "--set",
    "sets",
    metavar="NAME",
    multiple=True,
    help="What to measure: speed-of-light, memory, tensor, occupancy, stalls, roofline, communication, or a file like "
    "those in recipes/ncu/sets. Repeatable. [default: the first five]",
)
@click.option(
    "-o",
    "--output",
    metavar="NAME",
    help="Name of the report without suffix: leaves NAME.ncu-rep and NAME.csv. [default: the program and the time]",
)
@force_option
@free_option
@click.option("--window", is_flag=True, help="Measure only from cudaProfilerStart to cudaProfilerStop.")
@click.option(
    "--count",
    metavar="N",
    type=COUNT,
    help="At most N launches, or with --replay range and app-range N ranges. [default: 10 with --kernel, else all]",
)
@click.option("--skip", metavar="N", type=COUNT, help="Skip the first N launches that match.")
@click.option(
    "--arch",
    type=click.Choice(["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]),
    help="Architecture, where metrics differ. [default: that of the first GPU, else sm_90]",
)
@click.option(
    "--clock",
    type=click.Choice(["base", "none"]),
    default="none",
    show_default=True,
    help="base: fixed clocks, numbers that repeat; none: as the program runs, as nsys sees it.",
)
@click.option(
    "--cache",
    type=click.Choice(["all", "none"]),
    default="all",
    show_default=True,
    help="all: empty caches before each pass, numbers that repeat; none: leave them.",
)
@click.option(
    "--replay",
    type=click.Choice(["kernel", "application", "range", "app-range"]),
    help="What is run again for each pass; range and app-range measure the layer's ranges as a whole each. [default: "
    "kernel; application, the whole program, with --rank or where NVLink is measured, since what waits for another GPU "
    "hangs when it is run again alone]",
)
@click.option(
    "--rank",
    metavar="N",
    type=COUNT,
    help="Of a program of several ranks measure rank N alone, since under one ncu they would wait for each other; its "
    "launcher has to start recipes/ncu/rank.sh on each.",
)
@click.option(
    "-x",
    "--ncu",
    "extra",
    metavar="OPTION",
    multiple=True,
    help="Additional word for ncu, passed unchanged: -x --devices -x 0. Repeatable.",
)
@click.option(
    "--annotate", is_flag=True, help="Annotate the model without changing the program, at the model's first call."
)
@click.option("-q", "--quiet", is_flag=True, help="Print only errors, for the logs of batch jobs.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the equivalent ncu commands and run nothing.")
@click.argument("program", metavar="-- PROGRAM [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def profile(program: tuple[str, ...], output: str | None, annotate: bool, **options: Any) -> None:
    """Measure a layer, kernels, or the data of a roofline with ncu.

    One of --layer PATH, --kernel NAME, --capture run.sqlite and --roofline says what: the kernels that a layer
    launches, those of a name, the costliest of an nsys capture, or operations, bytes and peaks.
    """
    from nvprof_kit._capture.ncu import measure_program
    from nvprof_kit._capture.profile import report_name
    from nvprof_kit.integrations.annotate import environment

    added = environment(annotate=True) if annotate else {}
    status = measure_program(
        program, output or report_name(program), environ=added, costliest_kernels=_costliest_kernels, **options
    )
    raise click.exceptions.Exit(status)


def _costliest_kernels(capture: str, top: int) -> list[str]:
    from nvprof_kit._trace.files.kinds import NEEDED_NSYS, NSYS, expect
    from nvprof_kit._trace.open import open_capture

    expect(capture, NSYS, NEEDED_NSYS)
    ops = open_capture(capture, optional=("mangled",)).ops
    kernels = ops[ops["mangled"] != ""]
    duration_ns = (kernels["end_ns"] - kernels["start_ns"]).groupby(kernels["mangled"], observed=True).sum()
    return [str(name) for name in duration_ns.sort_values(ascending=False, kind="stable").index[:top]]
