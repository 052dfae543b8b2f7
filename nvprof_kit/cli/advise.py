"""``nvprof-kit advise``: what to do."""

from __future__ import annotations

from pathlib import Path

import click

from nvprof_kit.cli.kernel_rules import kernel_rules, read_kernel_rules
from nvprof_kit.cli.output import Reading, reading
from nvprof_kit.errors import UsageError
from nvprof_kit.report import plots, tables


@click.command(short_help="What costs time and could be changed, with the evidence.")
@reading
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Findings for reading.")
@kernel_rules
def advise(asked: Reading, *, top: int, rules_path: Path | None) -> None:
    """Findings ranked by what they could save: the numbers, the layer, where to look in Nsight, and what to try.

    A rule that finds nothing in the capture says nothing.
    """
    from nvprof_kit.analysis.advise import advise as analyse
    from nvprof_kit.analysis.breakdown import OPTIONAL
    from nvprof_kit.trace.open import open_capture

    if asked.output.form in plots.FORMATS:
        raise UsageError("advise has no plot; needed a table format")
    rules = read_kernel_rules(rules_path)
    results = [analyse(open_capture(one, domain=asked.domain, optional=OPTIONAL), rules) for one in asked.captures]
    if asked.output.form in tables.FORMATS:
        named = [(result.info.path, result.rows) for result in results]
        chosen = tables.with_capture(named) if len(named) > 1 else named[0][1]
        asked.output.write(tables.encode(chosen, asked.output.form))
        return
    from nvprof_kit.report.advise import advise_report

    asked.output.print(part for result in results for part in [*advise_report(result, top), ""])
