"""``nvprof-kit breakdown``: time of each step by category."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import kernel_rules, rules_option, selecting, steps_options, top_option
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._api.capture import BreakdownView
    from nvprof_kit._result.selection import Selection

VIEWS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")


@click.command(short_help="Split the time of each step: compute, communication, copies, idle and its causes.")
@reading()
@click.option("--view", type=click.Choice(VIEWS), help="One table only; csv, json, md and parquet default to steps.")
@top_option(10, "Rows to print per table")
@selecting(fold=True)
@steps_options
@rules_option
@kernel_rules
def breakdown(
    request: Reading,
    *,
    view: BreakdownView | None,
    top: int,
    select: Selection,
    steps: StepOptions,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """Split the time of each step on each GPU into compute, exposed communication, exposed copies, and idle time by
    cause.

    The parts add up to the wall time exactly. Further tables show idle time by cause and place, communication, copies,
    launches, the queue of launched operations during a step, and the critical path of a step.
    """
    results = each(
        request.captures, lambda one: request.open(one, rules, rules_path).breakdown(view, top=top, steps=steps)
    )
    request.output.write_results(results, select)
