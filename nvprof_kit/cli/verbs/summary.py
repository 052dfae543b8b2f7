"""``nvprof-kit summary``: eight views of a capture."""

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

VIEWS = ("device", "overview", "model", "distributed", "operator", "kernel", "memory", "user")


@click.command(short_help="Eight views: device, overview, model, distributed, operator, kernel, memory, user.")
@reading
@click.option(
    "--view", "views", multiple=True, type=click.Choice(VIEWS), help="A view; may be given again. [default: all]"
)
@click.option("--by", type=click.Choice(["step"]), help="Rows for each step instead of over all.")
@click.option("--sort", default="", metavar="COLUMN", help="Column to sort by, as csv names it: gpu_p95_ns, calls, ...")
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Rows of a view for reading.")
@rules_option
@kernel_rules
def summary(
    asked: Reading,
    *,
    views: tuple[str, ...],
    by: str | None,
    sort: str,
    top: int,
    rules: Rules | None,
    rules_path: Path | None,
) -> None:
    """Eight views of a capture, with calls, and of CPU and GPU time total, avg, max, min, p50, p95 and ratio.

    csv, json, md and parquet hold one view: name it with --view.
    """
    from nvprof_kit.analysis.summary.summary import OPTIONAL, SummaryOptions
    from nvprof_kit.analysis.summary.summary import summary as analyse

    if asked.output.form in plots.FORMATS:
        raise UsageError("summary has no plot; needed a table format, or nvprof-kit report")
    if asked.output.form in tables.FORMATS and len(views) != 1:
        raise UsageError(f"--format {asked.output.form} holds one view; name it with --view, one of {', '.join(VIEWS)}")
    options = SummaryOptions(views, by == "step", sort, read_kernel_rules(rules_path))
    results = each(asked.captures, lambda one: analyse(opened(one, asked.domain, rules, OPTIONAL), options))
    if sort and not any(sort in view for result in results for view in result.views.values()):
        columns = dict.fromkeys(name for result in results for view in result.views.values() for name in map(str, view))
        raise UsageError(f"--sort {sort}: no such column; there are {', '.join(columns)}")
    if asked.output.form in tables.FORMATS:
        asked.output.write_tables([(result.info.path, result.views[views[0]], result.warnings) for result in results])
        return
    from nvprof_kit.report.text.summary import summary_report

    asked.output.print(part for result in results for part in [*summary_report(result, top), ""])
