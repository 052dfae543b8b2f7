"""The verbs that take, check and scrub captures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from nvprof_kit._api.checks import doctor as check
from nvprof_kit._api.checks import is_capture, scrubbed_name
from nvprof_kit._api.checks import scrub as write_scrubbed
from nvprof_kit._capture.ncu import measure_program
from nvprof_kit._capture.profile import profile_program, program_name, report_name
from nvprof_kit._capture.ranks import choose_rank
from nvprof_kit._capture.report import expand_name, need_program, print_command, recipes_folder, say
from nvprof_kit._capture.session import launch_session, print_status, start_session, stop_session
from nvprof_kit._cli.verb import CAPTURE, COUNTERS, WITHOUT_PLOT, Output, progress
from nvprof_kit._cli.verbs.job import ranks
from nvprof_kit._cli.verbs.sources import ncu
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, NSYS, expect
from nvprof_kit.errors import UsageError
from nvprof_kit.integrations.annotate import environment
from nvprof_kit.issues import Issue


class _Doctor(click.Command):
    """Options are allowed after captures; after a command name they belong to the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether the words follow ``--``."""
        ctx.obj = "--" in args
        ctx.allow_interspersed_args = "--" in args or any(map(is_capture, args))
        return super().parse_args(ctx, args)


def _profiled(
    program: tuple[str, ...], name: str, *, annotate: bool = False, count: bool = False, **options: Any
) -> NoReturn:
    """Run the program under nsys and exit with its status.

    Args:
        program: The program.
        name: The report.
        annotate: Annotate the model without changing the program, at the model's first call.
        count: Count the operations and the bytes of the program's second step, best outside the captured steps, into
            NAME.flops.json: layers and flops then have each layer's least time.
        options: The arguments of `profile_program`.
    """
    from nvprof_kit._trace.nsys.export import is_empty

    report = Path(expand_name(name.removesuffix(".nsys-rep")) if count else name).absolute()
    counts = report.with_name(f"{report.name}.flops.json") if count else None
    if counts is not None and not options["dry_run"]:
        _remove_counts(counts, force=options["force"])
    environ = {**options.pop("environ", {}), **environment(annotate=annotate, count=str(counts or ""))}
    status = profile_program(program, name, is_empty=is_empty, environ=environ, **options)
    if counts is not None and not options["dry_run"] and not counts.exists():
        say(Issue.of("nothing-counted:steps"))
    raise click.exceptions.Exit(status)


def _remove_counts(counts: Path, *, force: bool) -> None:
    """Remove a file of counts that the program is to write.

    Raises:
        UsageError: It exists, and may not be overwritten.
    """
    if counts.exists() and not force:
        raise UsageError(f"{counts} exists; choose another name with -o NAME, or overwrite it with --force")
    counts.unlink(missing_ok=True)


@CAPTURE.verb("nvprof-kit profile --schedule 10:13 -o run -- python train.py", also=(_profiled, profile_program))
def profile(program: tuple[str, ...], *, output: str = "", **options: Any) -> None:
    """Run a program under nsys, from start to end or for some steps.

    nvprof-kit profile --step 12 -- python train.py leaves train-TIME.nsys-rep, for the Nsight Systems GUI, and
    train-TIME.sqlite, and prints the command that reads it. Ctrl-C and SIGTERM end the program, and the report is still
    written. The exit status is the program's; 1 where nothing was captured, 127 where there is no such program.

    Options:
        output: Name of the report without suffix; %h is the host, %p this process, %q{VARIABLE} a variable. [default:
            the program and the time]
    """
    _profiled(program, output or report_name(program), **options)


@CAPTURE.verb(
    "torchrun --nproc-per-node 8 --no-python nvprof-kit ranks profile --ranks 0,7 -- python train.py",
    also=(choose_rank, _profiled, profile_program),
    name="profile",
    under=ranks,
)
def ranks_profile(program: tuple[str, ...], *, output: str = "", ranks: str, **options: Any) -> None:
    """Run some ranks of a job under nsys, and the others without a profiler.

    It stands between the launcher and the program, on every rank: torchrun --nproc-per-node 8 --no-python nvprof-kit
    ranks profile --ranks 0,7 -- python train.py. Reports are named PROGRAM-RUN-HOST-rankR-TIME.

    With accelerate the launcher's option is --no_python, with deepspeed --no_python --no_local_rank; srun and mpirun
    need none. With --preset metrics each rank samples the GPU of its own local rank.

    Options:
        output: Beginning of the reports' names. [default: the program]
    """
    if not program:
        raise UsageError.of("no-program")
    rank = choose_rank(ranks)
    environ = {"NVPROF_KIT_RUN_ID": rank.run_id} if rank.run_id else {}
    if rank.is_chosen:
        if options["preset"] == "metrics" and rank.gpu:
            options["nsys"] = (*options["nsys"], f"--gpu-metrics-devices={rank.gpu}")
        name = rank.report_name((output or program_name(program)).removesuffix(".nsys-rep"))
        _profiled(program, name, environ=environ, **options)
    if options["dry_run"]:
        print_command(program)
        return
    need_program(program)
    os.execvpe(program[0], program, {**os.environ, **environ})


@COUNTERS.verb(
    "nvprof-kit ncu profile --layer model.layers.3.mlp -o mlp -- python train.py",
    also=(measure_program,),
    name="profile",
    under=ncu,
)
def ncu_profile(program: tuple[str, ...], *, output: str | None = None, annotate: bool = False, **options: Any) -> None:
    """Measure a layer or kernels with ncu.

    --layer PATH or --kernel NAME says which: the kernels that a layer launches, or those of a name. --set roofline
    without them measures every launch. See ncu plan for the costliest kernels of an nsys capture.

    Options:
        output: Name of the report without suffix: leaves NAME.ncu-rep and NAME.csv. [default: the program and the time]
        annotate: Annotate the model without changing the program, at the model's first call.
    """
    added = environment(annotate=True) if annotate else {}
    raise click.exceptions.Exit(measure_program(program, output or report_name(program), environ=added, **options))


@click.group()
def session() -> None:
    """Capture stretches of a running program, as many as are wanted.

    nvprof-kit session launch -- python serve.py, and from another terminal nvprof-kit session start; sleep 10;
    nvprof-kit session stop.
    """


CAPTURE.add(session)


@CAPTURE.verb("nvprof-kit session launch -- python serve.py", also=(launch_session,), under=session)
def launch(program: tuple[str, ...], *, annotate: bool = False, **options: Any) -> None:
    """Run a program in an nsys session that captures nothing yet.

    session start and session stop, from another terminal, then capture stretches of it. Give session start the same
    preset. The exit status is the program's.

    Options:
        annotate: Annotate the model without changing the program, at the model's first call.
    """
    raise click.exceptions.Exit(launch_session(program, environ=environment(annotate=annotate), **options))


@CAPTURE.verb("nvprof-kit session start -o first", also=(start_session,), under=session)
def start(**options: Any) -> None:
    """Begin a capture in a session."""
    raise click.exceptions.Exit(start_session(**options))


@CAPTURE.verb("nvprof-kit session stop", also=(stop_session,), under=session)
def stop(**options: Any) -> None:
    """Stop the capture and write its report; the program continues."""
    from nvprof_kit._trace.nsys.export import is_empty

    raise click.exceptions.Exit(stop_session(is_empty=is_empty, **options))


CAPTURE.verb("nvprof-kit session status", name="status", under=session)(print_status)


@CAPTURE.verb("nvprof-kit record -o run.json.gz -- python train.py")
def record(
    command: tuple[str, ...],
    *,
    output: str = "run.json.gz",
    force: bool = False,
    schedule: str = "",
    max_memory: int = 500,
    annotate: bool | None = None,
    count: bool = False,
    detail: Sequence[Literal["stacks", "shapes", "memory"]] = (),
) -> None:
    """Run a Python program under PyTorch's profiler, for machines without Nsight Systems.

    The trace contains the layers of annotated models; read it with nvprof-kit layers. Each rank of a launcher
    (torchrun, accelerate, deepspeed, mpirun, srun) writes its own. The exit status is the program's.

    Options:
        output: Trace file, .json or .json.gz.
        force: Overwrite existing traces.
        schedule: Record some steps: 50:60, early, stable, periodic, or skip_first=50,active=10,repeat=2. Steps are
            those of nvprof_kit.step, or else optimizer steps.
        max_memory: Stop recording when the process has grown by this much since its first step; 0 for no limit. PyTorch
            needs about six times as much memory to write the trace.
        annotate: Annotate the model without changing the program. By default only with --detail stacks, whose
            modules would be classes with numbers.
        count: Count the operations and the bytes of the program's second step, best outside the recorded steps, into
            NAME.flops.json.
        detail: Record also Python call stacks, beginning with the first module call; the input shapes of each operator;
            or each allocation and release. Repeatable.
    """
    from nvprof_kit._capture.recorder.launch import record_program

    path = Path(output).absolute()
    counts = path.with_name(f"{path.name.partition('.json')[0]}.flops.json") if count else None
    if counts is not None:
        _remove_counts(counts, force=force)
    recorded = {name: name in detail for name in ("stacks", "shapes", "memory")}
    settings = json.dumps({"path": str(path), "options": recorded, "schedule": schedule, "memory_mb": max_memory})
    environ = environment(
        annotate="stacks" in detail if annotate is None else annotate, count=str(counts or ""), record=settings
    )
    raise click.exceptions.Exit(record_program(path, command, schedule, force=force, environ=environ))


@CAPTURE.verb("nvprof-kit doctor run.sqlite", writes=WITHOUT_PLOT, cls=_Doctor, ignore_unknown_options=True)
def doctor(output: Output, subject: tuple[str, ...], *, measure: str | None = None) -> None:
    """Check this machine before profiling, or a capture after it, for problems that make a profile fail or mislead.

    Without a CAPTURE, doctor checks this machine: GPU, driver, nsys, ncu, permissions, container, other profilers,
    disk; with a COMMAND also the Python, torch and script that the command runs. It starts no profile and changes
    nothing.

    A CAPTURE is an nsys .sqlite or .nsys-rep, a folder of `nsys export --type=parquetdir`, or a PyTorch trace. Each
    finding says what was seen, why it matters and how to fix it. The exit status is 1 if a finding is an error.

    Options:
        measure: Measure this GPU's peaks, for 10 s, and leave them in FOLDER [default: .] for the captures there.
    """
    separated = click.get_current_context().obj
    if subject and not separated and Path(subject[0]).is_file():  # a program to run is not of a known kind
        expect(subject[0], CAPTURES, NEEDED)
    of_captures = bool(subject) and (is_capture(subject[0]) or (not separated and Path(subject[0]).is_dir()))
    if of_captures:
        output.spare(subject)
    checks = check(*subject, measure=measure) if of_captures else check(command=subject, measure=measure)
    output.write_results([checks])
    if not checks.ok:
        sys.stdout.flush()
        raise click.exceptions.Exit(1)


@CAPTURE.verb("nvprof-kit scrub run.sqlite -o public.sqlite")
def scrub(capture: str, *, output: str | None = None, also: str | None = None) -> None:
    """Copy a capture without private data: environment variables, command line, host name, captured output and other
    processes.

    CAPTURE is an .sqlite or .sqlite.xz. Times, kernels and ranges are kept. An .nsys-rep contains the same data and
    cannot be scrubbed: share the scrubbed copy instead.

    Options:
        output: File of the copy. [default: NAME.scrubbed.sqlite]
        also: Replace each text that matches REGEX, such as a project name.
    """
    expect(capture, NSYS, "an nsys export, .sqlite or .sqlite.xz")
    target = output or scrubbed_name(capture)
    with progress() as report:
        report(f"copying {capture}")
        removed = write_scrubbed(capture, target, also=also)
    taken = ", ".join(f"{kind} ({count:,})" for kind, count in removed.items() if count)
    click.echo(f"{target}: without {taken or 'anything to take out: there was nothing private in it'}", err=True)


@CAPTURE.verb('ls "$(nvprof-kit recipes)"')
def recipes() -> None:
    """Print the folder of the shell recipes.

    Run one with: bash "$(nvprof-kit recipes)/nsys/profile.sh" python train.py

    The folder has SKILL.md too, a guide for language models: which command answers which question, how to read the
    output, and when to abstain.
    """
    click.echo(recipes_folder())
