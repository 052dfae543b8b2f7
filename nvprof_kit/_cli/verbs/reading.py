"""The verbs that read captures and other files. Each asks one question of the library; its options are arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvprof_kit._cli.inputs import LINES, Number, row_options, step_options
from nvprof_kit._cli.output import Output, reading, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit._result import formats
from nvprof_kit._trace.files.kinds import PICKLE, TIMERS, expect
from nvprof_kit.errors import NvprofKitError, UsageError

if TYPE_CHECKING:
    from nvprof_kit._api.capture import Capture
    from nvprof_kit._api.job import Job
    from nvprof_kit._result.result import Result

BREAKDOWNS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")
SUMMARIES = ("device", "overview", "model", "distributed", "operator", "kernel", "memory", "user")
MEMORY = ("layer", "stack", "size", "allocation", "step", "segment", "leak")

_depth = click.option("--depth", type=click.IntRange(min=1), help="Levels of the model to print; default: all.")


@reading("GPU and CPU time of each layer.")
@click.option("--by", type=click.Choice(["step"]), help="One row per step (in the printed table, one column).")
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model to print and plot; default: all.")
@click.option(
    "--memory", is_flag=True, help="Add the memory of each layer; needs a capture with memory marks or events."
)
@row_options(LINES, fold=True)
@click.option(
    "--columns",
    multiple=True,
    type=click.Choice(["class", "phase"]),
    help="Add columns that split the time by kernel class or by phase of the loop (prefill, decode). Repeatable.",
)
@click.option(
    "--process", type=int, metavar="RANK", help="One process of a capture with several. [default: all, added up]"
)
@click.option(
    "--with",
    "with_",
    metavar="CAPTURE",
    help="PyTorch trace of the capture of the CUDA graphs that are replayed: its modules name the replays' kernels.",
)
@step_options
def layers(capture: Capture, **options: Any) -> Result:
    """GPU and CPU time of each layer by phase, and the time outside all layers.

    A CAPTURE is an nsys .sqlite, .nsys-rep or parquetdir, or a PyTorch trace (.json, .json.gz), or .xz of them. FILE
    ends in .csv, .json, .md, .parquet or .txt for the table, in .png, .svg or .pdf for a plot.
    """
    return capture.layers(**options)


@reading("Eight views: device, overview, model, distributed, operator, kernel, memory, user.", kernel_rules=True)
@click.option("--view", multiple=True, type=click.Choice(SUMMARIES), help="A view. Repeatable. [default: all]")
@click.option("--by", type=click.Choice(["step"]), help="One set of rows per step.")
@click.option("--sort", default="", metavar="COLUMN", help="Column to sort by, named as in csv: gpu_p95_ns, calls, ...")
@row_options("Rows to print per view. [default: 12]", where=False, sort=False)
@step_options
def summary(capture: Capture, view: tuple[Any, ...], **options: Any) -> Result:
    """Summarize a capture in eight views: calls, and total, avg, max, min, p50, p95 and ratio of CPU and GPU time.

    csv, json, md and parquet hold one view: name it with --view.
    """
    file_format = click.get_current_context().obj.form
    if file_format in formats.TABLES and len(view) != 1:
        raise UsageError(f"--format {file_format} holds one view; name it with --view, one of {', '.join(SUMMARIES)}")
    return capture.summary(view, **options)


@reading("Split the time of each step: compute, communication, copies, idle and its causes.", kernel_rules=True)
@click.option("--view", type=click.Choice(BREAKDOWNS), help="One table; csv, json, md and parquet default to steps.")
@row_options("Rows to print per table. [default: 10]", fold=True)
@step_options
def breakdown(capture: Capture, **options: Any) -> Result:
    """Split the time of each step on each GPU into compute, exposed communication, exposed copies, and idle time by
    cause.

    The parts add up to the wall time exactly. Further tables show idle time by cause and place, communication, copies,
    launches, the queue of launched operations during a step, and the critical path of a step.
    """
    return capture.breakdown(**options)


def _peaks(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    from nvprof_kit._analysis.hardware import parse_peak

    return dict(map(parse_peak, texts))


@reading("Floating point operations, TFLOP/s and MFU of each layer.")
@click.option(
    "--counts",
    metavar="FILE",
    help="File written by nvprof_kit.count_flops; default: NAME.flops.json next to the capture NAME.sqlite.",
)
@click.option(
    "--peak",
    metavar="TYPE=FLOPS",
    multiple=True,
    callback=_peaks,
    help="Peak of the GPU for a data type, in operations per second, such as bf16=989e12. Repeatable.",
)
@_depth
@row_options(LINES, fold=True)
@step_options
def flops(capture: Capture, **options: Any) -> Result:
    """Floating point operations, achieved TFLOP/s and model FLOPs utilization (MFU) of each layer.

    A CAPTURE is an nsys .sqlite, .nsys-rep or parquetdir, or a PyTorch trace (.json, .json.gz), also packed as .xz; the
    operations are counted by nvprof_kit.count_flops in a step of the same program, or derived from the shapes in a
    PyTorch trace. FILE ends in .csv, .json, .md, .parquet or .txt, in .png, .svg or .pdf for a plot of the MFU.
    """
    return capture.flops(**options)


@reading("GPU Metrics of each layer, sampled by nsys.", nsys=True)
@click.option(
    "--floor",
    type=Number(min=1),
    default=20.0,
    show_default=True,
    help="Minimum samples; a layer with fewer has no figures.",
)
@_depth
@row_options(LINES, fold=True)
@step_options
def metrics(capture: Capture, **options: Any) -> Result:
    """How busy each layer keeps SMs, Tensor Cores, DRAM, NVLink and PCIe, from nsys GPU Metrics samples.

    A CAPTURE is an nsys .sqlite or .nsys-rep recorded with --gpu-metrics-device, also packed as .xz. FILE ends in .csv,
    .json, .md, .parquet or .txt.
    """
    return capture.metrics(**options)


@reading("Find what could be made faster, with evidence and fixes.", kernel_rules=True)
@row_options("Findings to print. [default: 10]")
@step_options
def advise(capture: Capture, **options: Any) -> Result:
    """Find what could be made faster, ranked by the time it could save: evidence, layer, place in Nsight, and fix.

    With the captures of all ranks of a run, the slowest rank comes first.
    """
    job = click.get_current_context().meta.setdefault("nvprof_kit.job", [])
    if not job:
        job.append(_job(capture))
    return capture.advise(job=job[0], **options)


def _job(capture: Capture) -> Job | None:
    """The captures of the command as one job, if they are the ranks of one run."""
    captures = click.get_current_context().params["captures"]
    if len(captures) < 2:
        return None
    from nvprof_kit._api.job import open_job

    try:
        job = open_job(captures, domain=capture.domain, rules=capture._rules)
        return job if job.verdict.rank is not None else None
    except NvprofKitError:  # they are not ranks of one run: each is looked at alone
        return None


@click.command(short_help="Stages timed by global_timer: statistics, skew, straggler.")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@writing()
@click.option(
    "--by",
    type=click.Choice(["rank", "call"]),
    help="One row per stage and rank, or per call, instead of one per stage.",
)
@click.option(
    "--collective",
    multiple=True,
    metavar="STAGE",
    help="A stage that ends with a collective, for the verdict. Repeatable. [default: stages named after one, "
    "else backward]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="First calls of each stage to leave out of the verdict.",
)
@row_options(LINES, where=False)
@step_options
def timers(output: Output, logs: tuple[Path, ...], **options: Any) -> None:
    """How long the timed stages take on each rank, how much the ranks differ, and which rank the others wait for.

    A LOG is a timer_rank*.log or a folder that contains them. FILE ends in .csv, .json, .md, .parquet or .txt for the
    table, in .png, .svg or .pdf for the timeline over the ranks.
    """
    from nvprof_kit._api.sources import open_timers

    with progress() as report:
        report("reading logs and comparing ranks")
        opened = open_timers(*logs)
        output.spare(opened.sources)
        for log in logs:
            expect(log, (TIMERS,), "a timer_rank*.log of global_timer, or the folder that holds them")
        result = opened.timers(**options)
    output.write_results([result])


@click.command(short_help="Which layers held GPU memory, from a memory snapshot.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path(path_type=Path))
@writing("html")
@click.option(
    "--by",
    type=click.Choice(MEMORY),
    help="The table to give: holders of the peak by layer, stack or size; all allocations by layer; growth by step; "
    "segments; leaks. By default the terminal gets all, a file the first.",
)
@click.option(
    "--device", type=click.IntRange(min=0), help="Device ordinal; default: the device with the most reserved memory."
)
@row_options("Rows of each table for reading; default: 20.", fold=True)
@step_options
def memory(output: Output, snapshot: Path, **options: Any) -> None:
    """Which layers held GPU memory at the peak, how memory grew between steps, leaks, and fragmentation.

    A SNAPSHOT is a pickle by nvprof_kit.memory_snapshot or torch.cuda.memory._dump_snapshot. FILE ends in .csv, .json,
    .md, .parquet or .txt for a table, in .html for a page with everything, in .svg, .png or .pdf for the timeline (with
    --by segment: the segments).
    """
    from nvprof_kit._api.sources import open_snapshot

    output.spare([snapshot])
    expect(snapshot, (PICKLE,), "a snapshot of torch.cuda.memory._dump_snapshot")
    with progress() as report:
        report(f"reading {snapshot}")
        result = open_snapshot(snapshot).memory(**options)
    output.write_results([result])
