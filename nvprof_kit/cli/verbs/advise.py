"""``nvprof-kit advise``: what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import kernel_rules, opened, read_kernel_rules, rules_option
from nvprof_kit.cli.output import Reading, reading
from nvprof_kit.cli.progress import each
from nvprof_kit.errors import UsageError
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules


@click.command(short_help="What costs time and could be changed, with the evidence.")
@reading
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Findings for reading.")
@rules_option
@kernel_rules
def advise(asked: Reading, *, top: int, rules: Rules | None, rules_path: Path | None) -> None:
    """Findings ranked by what they could save: the numbers, the layer, where to look in Nsight, and what to try.

    A rule that finds nothing in the capture says nothing.
    """
    from nvprof_kit.analysis.advise.advise import OPTIONAL
    from nvprof_kit.analysis.advise.advise import advise as analyse

    if asked.output.form in plots.FORMATS:
        raise UsageError("advise has no plot; needed a table format")
    kernels = read_kernel_rules(rules_path)
    results = each(asked.captures, lambda one: analyse(opened(one, asked.domain, rules, OPTIONAL), kernels))
    if asked.output.form in tables.FORMATS:
        asked.output.write_tables([(result.info.path, result.rows, result.warnings) for result in results])
        return
    from nvprof_kit.report.text.advise import advise_report

    asked.output.print(part for result in results for part in [*advise_report(result, top), ""])
