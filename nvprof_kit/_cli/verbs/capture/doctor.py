"""``nvprof-kit doctor``: problems that make a profile fail or mislead."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nvprof_kit._api.checks import is_capture
from nvprof_kit._cli.output import Output, writing
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect

_COMMAND = "nvprof_kit.command"
"""Whether the words follow ``--``."""


class _Doctor(click.Command):
    """Options are allowed after captures; after a command name they belong to the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_COMMAND] = "--" in args
        ctx.allow_interspersed_args = "--" in args or any(map(is_capture, args))
        return super().parse_args(ctx, args)


@click.command(
    cls=_Doctor,
    short_help="Check a machine before a run, or a capture after it.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@writing(plot=False)
@click.option(
    "--measure",
    is_flag=False,
    flag_value=".",
    metavar="[FOLDER]",
    help="Measure this GPU's peaks, for 10 s, and leave them in FOLDER [default: .] for the captures there.",
)
@click.argument("words", metavar="[CAPTURE]... | [-- COMMAND]", nargs=-1, type=click.UNPROCESSED)
def doctor(output: Output, words: tuple[str, ...], measure: str | None) -> None:
    """Check this machine before profiling, or a capture after it, for problems that make a profile fail or mislead.

    Without a CAPTURE, doctor checks this machine: GPU, driver, nsys, ncu, permissions, container, other profilers,
        disk;
    with a COMMAND also the Python, torch and script that the command runs. It starts no profile and changes nothing.

    A CAPTURE is an nsys .sqlite or .nsys-rep, a folder of `nsys export --type=parquetdir`, or a PyTorch trace. Each
    finding says what
    was seen, why it matters and how to fix it. The exit status is 1 if a finding is an error.
    """
    from nvprof_kit._api.checks import doctor as examine

    separated = click.get_current_context().meta[_COMMAND]
    if words and not separated and Path(words[0]).is_file():  # a program to run is not of a known kind
        expect(words[0], CAPTURES, NEEDED)
    of_captures = bool(words) and is_capture(words[0])
    if of_captures:
        output.spare(words)
    checks = examine(*words, measure=measure) if of_captures else examine(command=words, measure=measure)
    output.write_results([checks])
    if not checks.ok:
        sys.stdout.flush()
        raise click.exceptions.Exit(1)
