"""``nvprof-kit breakdown``: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import kernel_rules, rules_option, selecting, steps_options
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._api.capture import BreakdownView
    from nvprof_kit._report.selection import Selection

VIEWS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")


@click.command(short_help="Where the time of a step goes, and why the GPU is idle.")
@reading()
@click.option("--view", type=click.Choice(VIEWS), help="One table alone; in csv, json, md and parquet default: steps.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Lines of a table for reading.")
@selecting()
@steps_options
@rules_option
@kernel_rules
def breakdown(
    asked: Reading,
    *,
    view: BreakdownView | None,
    top: int,
    select: Selection,
    steps: StepOptions,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """Where the time of each step goes on each GPU: compute, exposed communication, exposed copies, idle, and why idle.

    The parts add up to the wall time exactly. Further tables hold idle time by cause and place, communication, copies,
    launches, the queue of launched operations through a step, and the critical path of a step.
    """
    results = each(asked.captures, lambda one: asked.open(one, rules, rules_path).breakdown(view, top=top, steps=steps))
    asked.output.write_results(results, select)
