"""``nvprof-kit record``: capture without Nsight."""

from __future__ import annotations

from pathlib import Path

import click


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
    help="Trace to write, .json or .json.gz.",
)
@click.option("--stacks", is_flag=True, help="Record the Python source line of every operator.")
@click.option("--shapes", is_flag=True, help="Record the shapes of every operator's inputs.")
@click.option("--memory", is_flag=True, help="Record every allocation and release.")
@click.argument("command", metavar="-- python PROGRAM [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def record(path: Path, stacks: bool, shapes: bool, memory: bool, command: tuple[str, ...]) -> None:
    """Run a Python program under PyTorch's own profiler, where there is no Nsight.

    The trace holds the layers of annotated models; read it with nvprof-kit layers. The exit status is the program's.
    """
    from nvprof_kit._capture.launch import record_program
    from nvprof_kit._capture.record import RecordOptions

    record_program(path, RecordOptions(stacks=stacks, shapes=shapes, memory=memory), command)
