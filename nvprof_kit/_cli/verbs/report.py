"""``nvprof-kit report``: a page to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._api.capture import MANY_OPERATIONS
from nvprof_kit._cli.inputs import kernel_rules, rules_option, steps_options
from nvprof_kit._cli.output import NEEDED, Reading, reading_into
from nvprof_kit._cli.progress import progress
from nvprof_kit._trace.files.kinds import CAPTURES, expect

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions


@click.command(short_help="One page with everything, to open in a browser.")
@reading_into({".html": "html", ".htm": "html"})
@click.option("--step", type=int, help="The one step to show in time; default: all, to choose from.")
@click.option(
    "--findings/--no-findings",
    default=None,
    help=f"What to do, and where each step's time goes; default: of up to {MANY_OPERATIONS:,} operations.",
)
@steps_options
@rules_option
@kernel_rules
def report(
    asked: Reading,
    *,
    step: int | None,
    findings: bool | None,
    steps: StepOptions,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """One self-contained page, to open in a browser: what to do, layers, every step in time, kernels, idle causes.

    With several CAPTUREs the page holds the first of them and compares all with the first; it stays below 8 MB. FILE
    ends in .html. The page loads nothing from any network.
    """
    first, *others = asked.captures
    for capture in others:
        expect(capture, CAPTURES, NEEDED)
    asked.output.spare(asked.captures)
    with progress() as say:
        say(f"reading {', '.join(asked.captures)} and writing the page")
        made = asked.open(first, rules, rules_path).page(*others, step=step, findings=findings, steps=steps)
    asked.output.write_document(made)
