"""``nvprof-kit report``: a page to read."""

from __future__ import annotations

from pathlib import Path

import click

from nvprof_kit._capture import MANY_OPERATIONS
from nvprof_kit.cli.inputs import kernel_rules, rules_option
from nvprof_kit.cli.output import Reading, reading_into
from nvprof_kit.cli.progress import progress


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
    asked: Reading, *, step: int | None, findings: bool | None, rules: str | None, rules_path: Path | None
) -> None:
    """One self-contained page: what to do, layers, timeline of a step, time per step, warnings, to open in a browser.

    With several CAPTUREs the page holds each and compares them with the first. FILE ends in .html. The page loads
    nothing from any network.
    """
    first, *others = asked.captures
    asked.output.spare(asked.captures)
    with progress() as say:
        say(f"reading {', '.join(asked.captures)} and writing the page")
        made = asked.open(first, rules, rules_path).page(*others, step=step, findings=findings)
    asked.output.write_document(made)
