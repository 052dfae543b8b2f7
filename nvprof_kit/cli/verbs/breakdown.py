"""``nvprof-kit breakdown``: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import kernel_rules, opened, read_kernel_rules, rules_option
from nvprof_kit.cli.output import Reading, reading
from nvprof_kit.cli.progress import each
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules

VIEWS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")


@click.command(short_help="Where the time of a step goes, and why the GPU is idle.")
@reading
@click.option("--view", type=click.Choice(VIEWS), help="One table alone; in csv, json, md and parquet default: steps.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Lines of a table for reading.")
@rules_option
@kernel_rules
def breakdown(asked: Reading, view: str | None, top: int, rules: Rules | None, rules_path: Path | None) -> None:
    """Where the time of each step goes on each GPU: compute, exposed communication, exposed copies, idle, and why idle.

    The parts add up to the wall time exactly. Further tables hold idle time by cause and place, communication, copies,
    launches, the queue of launched operations through a step, and the critical path of a step.
    """
    from nvprof_kit.analysis.breakdown.breakdown import OPTIONAL
    from nvprof_kit.analysis.breakdown.breakdown import breakdown as analyse
    from nvprof_kit.errors import UsageError

    if asked.output.form in plots.FORMATS:
        raise UsageError("breakdown has no plot; needed a table format, or nvprof-kit report")
    kernels = read_kernel_rules(rules_path)
    results = each(asked.captures, lambda one: analyse(opened(one, asked.domain, rules, OPTIONAL), kernels))
    if asked.output.form in tables.FORMATS:
        view = view or "steps"
        asked.output.write_tables([(result.info.path, result.table(view), result.warnings) for result in results])
        return
    from nvprof_kit.report.text.breakdown import breakdown_report

    asked.output.print(part for result in results for part in [*breakdown_report(result, view, top), ""])
