"""``nvprof-kit profile``, ``ranks profile`` and ``session launch|start|stop|status``: capture with nsys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvprof_kit._cli.inputs import Number
from nvprof_kit.errors import UsageError

_PROGRAM = {"allow_interspersed_args": False}
COUNT = click.IntRange(0, 10**12 - 1)


def _options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return decorate


_program = click.argument("program", metavar="-- PROGRAM [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
_preset = click.option(
    "-p",
    "--preset",
    metavar="NAME",
    default="train",
    show_default=True,
    help="Settings: train, infer, graphs, memory, metrics, light, or a file like those in recipes/nsys/presets.",
)
_trace = click.option("-t", "--trace", metavar="LIST", help="What nsys traces, instead of the preset's list.")
_extra = click.option(
    "-x",
    "--nsys",
    "extra",
    metavar="OPTION",
    multiple=True,
    help="Additional option of nsys, passed unchanged: -x --stats=true. Repeatable.",
)
_annotate = click.option(
    "--annotate", is_flag=True, help="Annotate the model without changing the program, at the model's first call."
)
force_option = click.option("-f", "--force", is_flag=True, help="Overwrite existing reports.")
free_option = click.option(
    "--min-free",
    "min_free_mb",
    metavar="MB",
    type=COUNT,
    default=1024,
    show_default=True,
    help="Refuse to start with less disk left.",
)
_quiet = click.option("-q", "--quiet", is_flag=True, help="Print only errors, for the logs of batch jobs.")
_dry_run = click.option("-n", "--dry-run", is_flag=True, help="Print the equivalent nsys command and run nothing.")
_session = click.option(
    "-s",
    "--session",
    "name",
    metavar="NAME",
    default="nvprof_kit",
    show_default=True,
    help="Name of the session, a letter first.",
)


count_option = click.option(
    "--count",
    is_flag=True,
    help="Count the operations and the bytes of the program's second step, best outside the captured steps, into "
    "NAME.flops.json: layers and flops then have each layer's least time.",
)


def remove_counts(counts: Path, *, force: bool) -> None:
    """Remove a file of counts that the program is to write.

    Raises:
        UsageError: It exists, and may not be overwritten.
    """
    if counts.exists() and not force:
        raise UsageError(f"{counts} exists; choose another name with -o NAME, or overwrite it with --force")
    counts.unlink(missing_ok=True)


def _profiled(program: tuple[str, ...], name: str, annotate: bool, count: bool, **options: Any) -> int:
    """Run the program under nsys with what --annotate and --count add to its environment; returns its exit status."""
    from nvprof_kit._capture.profile import profile_program
    from nvprof_kit._capture.recorder.recording import NOTHING_COUNTED
    from nvprof_kit._capture.session import expand_name, say
    from nvprof_kit._trace.flops_file import find_flops
    from nvprof_kit._trace.nsys.export import is_empty
    from nvprof_kit.integrations.annotate import environment

    report = Path(expand_name(name.removesuffix(".nsys-rep")) if count else name).absolute()
    counts = report.with_name(f"{report.name}.flops.json") if count else None
    if counts is not None and not options["dry_run"]:
        remove_counts(counts, force=options["force"])
    added = environment(annotate=annotate, count=None if counts is None else str(counts))
    options["environ"] = {**options.get("environ", {}), **added}
    status = profile_program(program, name, is_empty=is_empty, **options)
    if counts is not None and not options["dry_run"] and find_flops(report.with_name(f"{report.name}.sqlite")) is None:
        say(NOTHING_COUNTED, quiet=options["quiet"])
    return status


_NAME = "Name of the report without suffix; %h is the host, %p this process, %q{VARIABLE} a variable. "
_profile_options = _options(
    force_option,
    _preset,
    _trace,
    _extra,
    _annotate,
    count_option,
    free_option,
    _quiet,
    _dry_run,
    click.option("--step", metavar="N", type=COUNT, help="Capture only the range of nvprof_kit.step(N)."),
    click.option(
        "--range",
        "text",
        metavar="TEXT",
        help="Capture only the first range TEXT in domain nvprof_kit; TEXT@DOMAIN for another domain, TEXT@ for none.",
    ),
    click.option(
        "--schedule",
        metavar="S",
        help="Capture the windows of nvprof_kit.record(schedule=None) in the program with this schedule: early, "
        "stable, periodic, 50:60, or skip_first=50,active=10,repeat=2. Each of several windows has its report: "
        "NAME.1, NAME.2, ...",
    ),
    click.option(
        "--windows",
        metavar="N",
        type=COUNT,
        help="Capture N windows of the program's own nvprof_kit.record(schedule=...); 0: all.",
    ),
    click.option("--cuda-profiler", is_flag=True, help="Capture from cudaProfilerStart to cudaProfilerStop."),
    click.option("--delay", metavar="S", type=Number(0), help="Begin S seconds after the program's start."),
    click.option(
        "--duration",
        metavar="S",
        type=Number(0),
        help="End after S seconds, and the program with it (SIGTERM); goes with --delay.",
    ),
    click.option(
        "--keep-running",
        is_flag=True,
        help="With --duration: let the program continue; the verb then returns immediately with 0.",
    ),
    click.option(
        "--export",
        type=click.Choice(["sqlite", "parquetdir", "none"]),
        default="sqlite",
        show_default=True,
        help="What to export beside the report: NAME.sqlite, the folder NAME_pqtdir, which is faster, or nothing.",
    ),
)


@click.command(context_settings=_PROGRAM, short_help="Run a program under nsys.")
@click.option("-o", "--output", metavar="NAME", help=f"{_NAME}[default: the program and the time]")
@_profile_options
@_program
def profile(program: tuple[str, ...], output: str | None, **options: Any) -> None:
    """Profile a program with nsys, from start to end or for some steps.

    nvprof-kit profile --step 12 -- python train.py leaves train-TIME.nsys-rep, for the Nsight Systems GUI, and
    train-TIME.sqlite, and prints the command that reads it. Ctrl-C and SIGTERM end the program, and the report is still
    written. The exit status is the program's; 1 where nothing was captured, 127 where there is no such program.
    """
    from nvprof_kit._capture.profile import report_name

    raise click.exceptions.Exit(_profiled(program, output or report_name(program), **options))


@click.command("profile", context_settings=_PROGRAM, short_help="Run some ranks under nsys.")
@click.option(
    "-r",
    "--ranks",
    metavar="LIST",
    default="0",
    show_default=True,
    help="Which ranks: all, or numbers, ranges and strides such as 0,3 or 0-7 or 0-31:8.",
)
@click.option(
    "--local",
    is_flag=True,
    help="LIST counts the ranks of each host: --ranks 0 --local profiles one on every host.",
)
@click.option("-o", "--output", metavar="NAME", help="Beginning of the reports' names. [default: the program]")
@_profile_options
@_program
def ranks_profile(program: tuple[str, ...], ranks: str, local: bool, output: str | None, **options: Any) -> None:
    """Profile some ranks of a job with nsys, and run the others without a profiler.

    It stands between the launcher and the program, on every rank: torchrun --nproc-per-node 8 --no-python nvprof-kit
    ranks profile --ranks 0,7 -- python train.py. Reports are named PROGRAM-RUN-HOST-rankR-TIME.

    With accelerate the launcher's option is --no_python, with deepspeed --no_python --no_local_rank; srun and mpirun
    need none. With --preset metrics each rank samples the GPU of its own local rank.
    """
    from nvprof_kit._capture.profile import program_name
    from nvprof_kit._capture.ranks import choose_rank
    from nvprof_kit._capture.session import need_program, print_command

    if not program:
        raise UsageError(
            "no program to run; needed: torchrun ... --no-python nvprof-kit ranks profile -- python train.py"
        )
    rank = choose_rank(ranks, local=local)
    environ = {"NVPROF_KIT_RUN_ID": rank.run_id} if rank.run_id else {}
    if rank.is_chosen:
        if options["preset"] == "metrics" and rank.gpu:
            options["extra"] = (*options["extra"], f"--gpu-metrics-devices={rank.gpu}")
        name = rank.report_name((output or program_name(program)).removesuffix(".nsys-rep"))
        raise click.exceptions.Exit(_profiled(program, name, environ=environ, **options))
    if options["dry_run"]:
        print_command(program)
        return
    need_program(program)
    os.execvpe(program[0], program, {**os.environ, **environ})


@click.group(short_help="Capture stretches of a running program.")
def session() -> None:
    """Capture stretches of a running program, as many as are wanted.

    nvprof-kit session launch -- python serve.py, and from another terminal nvprof-kit session start; sleep 10;
    nvprof-kit session stop.
    """


@session.command(context_settings=_PROGRAM)
@_session
@_preset
@_trace
@_extra
@_annotate
@_quiet
@_dry_run
@_program
def launch(program: tuple[str, ...], name: str, annotate: bool, **options: Any) -> None:
    """Run a program in an nsys session that captures nothing yet.

    nvprof-kit session launch -- python serve.py; session start and session stop, from another terminal, then capture
    stretches of it. Give session start the same preset. The exit status is the program's.
    """
    from nvprof_kit._capture.profile import launch_session
    from nvprof_kit.integrations.annotate import environment

    raise click.exceptions.Exit(launch_session(program, name, environ=environment(annotate=annotate), **options))


@session.command()
@_session
@click.option("-o", "--output", metavar="NAME", help=f"{_NAME}[default: SESSION.1, or the next number that is free]")
@force_option
@_preset
@_extra
@free_option
@_quiet
@_dry_run
def start(name: str, **options: Any) -> None:
    """Begin a capture in a session: nvprof-kit session start -o first."""
    from nvprof_kit._capture.profile import start_session

    raise click.exceptions.Exit(start_session(name, **options))


@session.command()
@_session
@click.option("--shutdown", is_flag=True, help="End the session too, and the program with it (SIGTERM).")
@_quiet
@_dry_run
def stop(name: str, **options: Any) -> None:
    """Stop the capture and write its report; the program continues: nvprof-kit session stop."""
    from nvprof_kit._capture.profile import stop_session
    from nvprof_kit._trace.nsys.export import is_empty

    raise click.exceptions.Exit(stop_session(name, is_empty=is_empty, **options))


@session.command()
@click.option("-e", "--environment", is_flag=True, help="Also what nsys says about CPU sampling and the machine.")
@_dry_run
def status(environment: bool, dry_run: bool) -> None:
    """List the nsys sessions of this machine and their states: nvprof-kit session status."""
    from nvprof_kit._capture.profile import print_status

    print_status(environment=environment, dry_run=dry_run)
