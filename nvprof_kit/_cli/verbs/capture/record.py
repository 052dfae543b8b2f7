"""``nvprof-kit record``: capture without Nsight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nvprof_kit._cli.inputs import Number
from nvprof_kit._cli.verbs.capture.capturing import count_option, remove_counts


@click.command(
    short_help="Run a Python program under PyTorch's profiler.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default="run.json.gz",
    show_default=True,
    help="Trace file, .json or .json.gz.",
)
@click.option("-f", "--force", is_flag=True, help="Overwrite existing traces.")
@click.option(
    "--schedule",
    metavar="S",
    default="",
    help="Record some steps: 50:60, early, stable, periodic, or skip_first=50,active=10,repeat=2. Steps are those of "
    "nvprof_kit.step, or else optimizer steps.",
)
@click.option(
    "--limit", "seconds", metavar="SECONDS", type=Number(0), default=0, help="Stop recording after this time."
)
@click.option(
    "--max-memory",
    "memory_mb",
    metavar="MB",
    type=click.IntRange(0),
    default=500,
    show_default=True,
    help="Stop recording when the process has grown by this much since its first step; 0 for no limit. PyTorch needs "
    "about six times as much memory to write the trace.",
)
@click.option(
    "--annotate/--no-annotate",
    default=None,
    help="Annotate the model without changing the program. Default: only with --stacks, which else names modules by "
    "class and number.",
)
@count_option
@click.option("--stacks", is_flag=True, help="Record Python call stacks, beginning with the first module call.")
@click.option("--shapes", is_flag=True, help="Record the input shapes of each operator.")
@click.option("--memory", is_flag=True, help="Record each allocation and release.")
@click.argument("command", metavar="-- python PROGRAM [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def record(path: Path, force: bool, annotate: bool | None, count: bool, command: tuple[str, ...], **given: Any) -> None:
    """Run a Python program under PyTorch's profiler, for machines without Nsight Systems.

    The trace contains the layers of annotated models; read it with nvprof-kit layers. Under torchrun or accelerate
    launch, each rank writes its own trace. The exit status is the program's.
    """
    from nvprof_kit._capture.recorder.launch import record_program
    from nvprof_kit._capture.recorder.record import RecordOptions
    from nvprof_kit._capture.recorder.recording import Limits
    from nvprof_kit.integrations.annotate import environment

    options = RecordOptions(**{name: given.pop(name) for name in ("stacks", "shapes", "memory")})
    counts = path.absolute().with_name(f"{path.name.partition('.json')[0]}.flops.json") if count else None
    if counts is not None:
        remove_counts(counts, force=force)
    environ = environment(
        annotate=options.stacks if annotate is None else annotate, count=None if counts is None else str(counts)
    )
    record_program(path, options, command, Limits(**given), force=force, environ=environ)
