"""``nvprof-kit summary``: eight views of a capture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import kernel_rules, rules_option, selecting, steps_options, top_option
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each
from nvprof_kit._result import formats
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._api.capture import SummaryView
    from nvprof_kit._result.selection import Selection

VIEWS = ("device", "overview", "model", "distributed", "operator", "kernel", "memory", "user")


@click.command(short_help="Eight views: device, overview, model, distributed, operator, kernel, memory, user.")
@reading()
@click.option("--view", "views", multiple=True, type=click.Choice(VIEWS), help="A view. Repeatable. [default: all]")
@click.option("--by", type=click.Choice(["step"]), help="One set of rows per step.")
@click.option("--sort", default="", metavar="COLUMN", help="Column to sort by, named as in csv: gpu_p95_ns, calls, ...")
@top_option(12, "Rows to print per view")
@selecting(where=False, sort=False)
@steps_options
@rules_option
@kernel_rules
def summary(
    request: Reading,
    *,
    views: tuple[SummaryView, ...],
    by: str | None,
    sort: str,
    top: int,
    select: Selection,
    steps: StepOptions,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """Summarize a capture in eight views: calls, and total, avg, max, min, p50, p95 and ratio of CPU and GPU time.

    csv, json, md and parquet hold one view: name it with --view.
    """
    if request.output.form in formats.TABLES and len(views) != 1:
        raise UsageError(
            f"--format {request.output.form} holds one view; name it with --view, one of {', '.join(VIEWS)}"
        )
    results = each(
        request.captures,
        lambda one: request.open(one, rules, rules_path).summary(
            *views, by_step=by == "step", sort=sort, top=top, steps=steps
        ),
    )
    request.output.write_results(results, select)
