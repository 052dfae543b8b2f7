"""``nvprof-kit report``: a page to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import kernel_rules, opened, read_kernel_rules, rules_option
from nvprof_kit.cli.output import Reading, reading_into
from nvprof_kit.cli.progress import progress
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    from nvprof_kit.analysis.flops.flops import FlopsResult
    from nvprof_kit.analysis.foreign.rules import Rules
    from nvprof_kit.analysis.kernels.classes import Rule
    from nvprof_kit.report.page.data import Sheet
    from nvprof_kit.trace.schema import Trace

MANY_OPERATIONS = 200_000
"""From here on findings take so long that they have to be asked for."""


@click.command(short_help="One page with everything, to open in a browser.")
@reading_into({".html": "html", ".htm": "html"})
@click.option(
    "--step", type=int, help="Step to show in time; default: the typical one, the slowest, those of findings."
)
@click.option(
    "--findings/--no-findings",
    default=None,
    help=f"Look for what to do about it; default: in a capture of up to {MANY_OPERATIONS:,} operations.",
)
@rules_option
@kernel_rules
def report(
    asked: Reading, *, step: int | None, findings: bool | None, rules: Rules | None, rules_path: Path | None
) -> None:
    """One self-contained page: what to do, layers, timeline of a step, time per step, warnings, to open in a browser.

    With several CAPTUREs the page holds each and compares them with the first. FILE ends in .html. The page loads
    nothing from any network.
    """
    from nvprof_kit.analysis.advise.advise import OPTIONAL
    from nvprof_kit.trace.schema import MEMORY_TABLES

    kernels = read_kernel_rules(rules_path)
    with progress() as say:
        sheets = []
        for capture in asked.captures:
            say(f"reading {capture}")
            trace = opened(capture, asked.domain, rules, (*OPTIONAL, *MEMORY_TABLES))
            say(f"analysing {capture}: {len(trace.ops):,} operations")
            sheets.append(_sheet(trace, step, findings, kernels))
        from nvprof_kit.report.page.page import report_page

        say("writing the page")
        made = report_page(sheets)
    asked.output.write(made)


def _sheet(trace: Trace, step: int | None, findings: bool | None, kernels: tuple[Rule, ...]) -> Sheet:
    from nvprof_kit.analysis.advise.advise import advise
    from nvprof_kit.report.page.data import sheet_of

    wanted = trace.info.on_gpu and (len(trace.ops) <= MANY_OPERATIONS if findings is None else findings)
    sheet = sheet_of(trace, step, advise(trace, kernels) if wanted else None, kernels)
    return replace(sheet, flops=_flops(trace))


def _flops(trace: Trace) -> FlopsResult | None:
    """What the layers get out of the GPU, where their operations were counted into a file beside the capture."""
    from nvprof_kit.trace.flops_file import find_flops, read_flops

    counts = find_flops(trace.info.path)
    if counts is None:
        return None
    from nvprof_kit.analysis.flops.flops import flops

    try:
        return flops(trace, read_flops(counts))
    except CaptureError as error:  # nobody asked for it: the page does without
        click.echo(f"nvprof-kit: {error}; the page has no MFU", err=True)
        return None
