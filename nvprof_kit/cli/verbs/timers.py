"""``nvprof-kit timers``: the stages that `global_timer` timed, over all ranks."""

from __future__ import annotations

from pathlib import Path

import click

from nvprof_kit.cli.output import Output, writing
from nvprof_kit.cli.progress import progress
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots


@click.command(short_help="Stages timed by global_timer: statistics, skew, straggler.")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@writing()
@click.option(
    "--by",
    type=click.Choice(["rank", "call"]),
    help="A row for each stage and rank, or for each single call, instead of one for each stage.",
)
@click.option(
    "--collective",
    multiple=True,
    metavar="STAGE",
    help="A stage that ends with a collective, for the verdict; may be given again. [default: stages named after one, "
    "else backward]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="First calls of each stage left out of the verdict.",
)
def timers(output: Output, logs: tuple[Path, ...], by: str | None, collective: tuple[str, ...], warm_up: int) -> None:
    """How long the timed stages take on every rank, how far the ranks are apart, and which one the others wait for.

    A LOG is a timer_rank*.log or the folder that holds them. FILE ends in .csv, .json, .md, .parquet or .txt for the
    table, in .png, .svg or .pdf for the timeline over the ranks.
    """
    from nvprof_kit.analysis.timers import TimersOptions
    from nvprof_kit.analysis.timers import timers as analyse
    from nvprof_kit.trace.timer_log import read_timer_logs

    with progress() as say:
        say("reading logs")
        read = read_timer_logs(logs)
        say("comparing ranks")
        result = analyse(read, TimersOptions(by == "rank", collective, warm_up))
    if output.form in tables.FORMATS:
        output.write(tables.encode(result.calls if by == "call" else result.rows, output.form), result.warnings)
    elif output.form in plots.FORMATS:
        from nvprof_kit.report.text.timers import timeline_figure

        output.write(plots.encode(timeline_figure(result), output.form), result.warnings)
    else:
        from nvprof_kit.report.text.timers import timers_report

        output.print(timers_report(result))
