"""``nvprof-kit doctor``: why a run would fail, and whether a capture can be trusted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.output import Output, writing
from nvprof_kit.errors import CaptureError
from nvprof_kit.report.export import tables

if TYPE_CHECKING:
    from nvprof_kit.findings import Finding

_CAPTURES = (".sqlite", ".sqlite.xz", ".nsys-rep", ".nsys-rep.xz")


class _Doctor(click.Command):
    """Options may stand behind captures too; behind a command's name they are the command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args or any(word.endswith(_CAPTURES) for word in args)
        return super().parse_args(ctx, args)


@click.command(
    cls=_Doctor,
    short_help="Check a machine before a run, or a capture after it.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@writing(plot=False)
@click.argument("words", metavar="[CAPTURE]... | [-- COMMAND]", nargs=-1, type=click.UNPROCESSED)
def doctor(output: Output, words: tuple[str, ...]) -> None:
    """Say beforehand why a profile would fail or mislead, or afterwards whether a capture can be trusted.

    Without a CAPTURE it examines this machine: GPU, driver, nsys, ncu, permissions, container, other profilers, disk;
    with a COMMAND also the Python, torch and script that the command runs. It starts no profile and changes nothing.

    A CAPTURE is an nsys .sqlite or .nsys-rep. Each finding says what was seen, why it matters and how to fix it. The
    exit status is 1 if there is an error among them.
    """
    found = _examine_captures(words) if words and words[0].endswith(_CAPTURES) else _examine_machine(words)
    inputs = [word for word in words if word.endswith(_CAPTURES)]
    from nvprof_kit.report.text.doctor import findings_report, findings_table

    if output.form in tables.FORMATS:
        output.write(tables.encode(findings_table(found), output.form), inputs=inputs)
    else:
        output.print(findings_report(found), inputs)
    if any(finding.level == "error" for findings in found.values() for finding in findings):
        sys.stdout.flush()
        raise click.exceptions.Exit(1)


def _examine_machine(command: Sequence[str]) -> Mapping[str, Sequence[Finding]]:
    from nvprof_kit.capture.doctor import examine_machine
    from nvprof_kit.capture.machine import read_machine

    return {"machine": examine_machine(read_machine(command))}


def _examine_captures(words: Sequence[str]) -> Mapping[str, Sequence[Finding]]:
    from nvprof_kit.analysis.doctor import examine_captures
    from nvprof_kit.trace.nsys.health import read_health

    strangers = [word for word in words if not word.endswith(_CAPTURES)]
    if strangers:
        raise CaptureError(f"{strangers[0]}: no nsys capture; needed .sqlite or .nsys-rep, each also packed as .xz")
    return examine_captures([read_health(Path(word)) for word in words])
