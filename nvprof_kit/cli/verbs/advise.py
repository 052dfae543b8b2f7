"""``nvprof-kit advise``: what to do."""

from __future__ import annotations

from pathlib import Path

import click

from nvprof_kit.cli.inputs import kernel_rules, rules_option
from nvprof_kit.cli.output import Reading, reading
from nvprof_kit.cli.progress import each


@click.command(short_help="What costs time and could be changed, with the evidence.")
@reading()
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Findings for reading.")
@rules_option
@kernel_rules
def advise(asked: Reading, *, top: int, rules: str | None, rules_path: Path | None) -> None:
    """Findings ranked by what they could save: the numbers, the layer, where to look in Nsight, and what to try.

    A rule that finds nothing in the capture says nothing.
    """
    results = each(asked.captures, lambda one: asked.open(one, rules, rules_path).advise(top=top))
    asked.output.write_results(results)
