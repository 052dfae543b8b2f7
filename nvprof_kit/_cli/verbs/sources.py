"""The verbs of ncu, and those that read memory snapshots and logs of timers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from nvprof_kit._api.capture import Capture
from nvprof_kit._api.sources import MemorySnapshot, NcuReports, TimerLog, open_ncu
from nvprof_kit._cli.verb import COUNTERS, READ, TABLES, WITH_PAGE, LazyGroup, Output, progress
from nvprof_kit._result import formats
from nvprof_kit._result.result import TABLE, Result
from nvprof_kit._trace.files.kinds import NCU, NEEDED_NSYS, NSYS, PICKLE, TIMERS, expect
from nvprof_kit._trace.files.process import keep_freed_memory
from nvprof_kit.errors import UsageError


@click.group(cls=LazyGroup)
def ncu() -> None:
    """Hardware counters of each layer, from Nsight Compute (ncu).

    `plan` chooses kernels to measure from an nsys capture; `profile` measures; `layers` shows the results per layer.
    """


COUNTERS.add(ncu)


@COUNTERS.question(
    Capture.ncu_plan,
    "nvprof-kit ncu plan run.sqlite --share 0.8 --script plan.sh",
    nsys=True,
    without=("model", "where", "fold"),
    name="plan",
    under=ncu,
)
def plan(capture: Capture, script: str | None, **options: Any) -> Result:
    captures = click.get_current_context().params["captures"]
    if len(captures) > 1:
        raise UsageError(f"a plan needs one capture, not {len(captures)}")
    if script is not None:
        Output(TABLE, Path(script)).spare(captures)
    return capture.ncu_plan(script=script, **options)


@COUNTERS.verb(
    "nvprof-kit ncu layers plan.csv --capture run.sqlite", also=(open_ncu, NcuReports.layers), under=ncu, writes=TABLES
)
def layers(
    output: Output,
    reports: tuple[str, ...],
    *,
    by: Literal["kernel"] | None = None,
    capture: str | None,
    depth: int | None,
    domain: str | None,
    rules: str | None,
    **options: Any,
) -> None:
    """Hardware utilization of each layer: compute, memory and Tensor Core throughput, and what limits it.

    A REPORT is an .ncu-rep, or ncu's raw or details page as .csv, each also packed as .xz; several are combined.
    A picture is a roofline.

    Options:
        by: All metrics of each measured kernel, a row per kernel, in base units: ns, byte, hz, %.
    """
    output.spare([*reports, *([capture] if capture else [])])
    for report in reports:
        expect(report, NCU, "a raw or details page of ncu as .csv, or an .ncu-rep, each also packed as .xz")
    if capture is not None:
        expect(capture, NSYS, NEEDED_NSYS)
    if by and output.data_format in formats.PICTURES:
        raise UsageError("a plot of kernels is the roofline: nvprof-kit ncu layers REPORT -o roofline.png")
    with progress() as report_stage:
        report_stage(f"reading {', '.join(reports)}")
        opened = open_ncu(*reports, rules=rules, domain=domain)
        if by:
            output = replace(output, data_format="csv" if output.data_format == TABLE else output.data_format)
            return output.write_results([opened.kernels(**options)])
        result = opened.layers(capture, depth=depth, **options)
    output.write_results([result])


@READ.verb("nvprof-kit memory snapshot.pickle --by layer", also=(MemorySnapshot.memory,), writes=WITH_PAGE)
def memory(output: Output, snapshot: str, **options: Any) -> None:
    """Which layers held GPU memory at the peak, how memory grew between steps, leaks, and fragmentation.

    A SNAPSHOT is a pickle by nvprof_kit.memory_snapshot or torch.cuda.memory._dump_snapshot. An .html has everything, a
    picture the timeline (with --by segment: the segments).
    """
    keep_freed_memory()
    output.spare([snapshot])
    expect(snapshot, (PICKLE,), "a snapshot of torch.cuda.memory._dump_snapshot")
    with progress() as report:
        report(f"reading {snapshot}")
        result = MemorySnapshot(snapshot).memory(**options)
    output.write_results([result])


@READ.verb("nvprof-kit timers time_log/", also=(TimerLog.timers,), without=("where", "fold"), writes=TABLES)
def timers(output: Output, logs: tuple[str, ...], **options: Any) -> None:
    """How long the timed stages take on each rank, how much the ranks differ, and which rank the others wait for.

    A LOG is a timer_rank*.log or a folder that contains them. A picture is the timeline over the ranks.
    """
    with progress() as report:
        report("reading logs and comparing ranks")
        opened = TimerLog(logs)
        output.spare(opened.sources)
        for log in logs:
            expect(log, (TIMERS,), "a timer_rank*.log of global_timer, or the folder that holds them")
        result = opened.timers(**options)
    output.write_results([result])
