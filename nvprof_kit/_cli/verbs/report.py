"""``nvprof-kit report``: a self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._api.capture import MANY_OPERATIONS
from nvprof_kit._cli.inputs import kernel_rules, rules_option, steps_options
from nvprof_kit._cli.output import Reading, reading_into
from nvprof_kit._cli.progress import progress
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions


@click.command(short_help="Write one HTML page with everything.")
@reading_into({".html": "html", ".htm": "html"})
@click.option("--step", type=int, help="The only step on the timeline; default: all, with a selector.")
@click.option(
    "--findings/--no-findings",
    default=None,
    help=f"Include findings and the breakdown of steps; default: for up to {MANY_OPERATIONS:,} operations.",
)
@steps_options
@rules_option
@kernel_rules
def report(
    request: Reading,
    *,
    step: int | None,
    findings: bool | None,
    steps: StepOptions,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """Write one self-contained HTML page: findings, layers, timeline of the steps, kernels, idle causes.

    With several CAPTUREs, the page shows the details of the first ones and compares all with the first. It stays below
    8 MB and loads nothing from the network. FILE ends in .html.
    """
    first, *more_captures = request.captures
    for capture in more_captures:
        expect(capture, CAPTURES, NEEDED)
    request.output.spare(request.captures)
    with progress() as progress_line:
        progress_line(f"reading {', '.join(request.captures)} and writing the page")
        page = request.open(first, rules, rules_path).page(*more_captures, step=step, findings=findings, steps=steps)
    request.output.write_document(page)
