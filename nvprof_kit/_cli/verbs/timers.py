"""``nvprof-kit timers``: stages timed with `global_timer`, over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from nvprof_kit._cli.inputs import LINES, selecting, steps_options
from nvprof_kit._cli.output import Output, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit._trace.files.kinds import TIMERS, expect

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._result.selection import Selection


@click.command(short_help="Stages timed by global_timer: statistics, skew, straggler.")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@writing()
@click.option(
    "--by",
    type=click.Choice(["rank", "call"]),
    help="One row per stage and rank, or per call, instead of one per stage.",
)
@click.option(
    "--collective",
    multiple=True,
    metavar="STAGE",
    help="A stage that ends with a collective, for the verdict. Repeatable. [default: stages named after one, "
    "else backward]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="First calls of each stage to leave out of the verdict.",
)
@selecting(where=False, top=LINES)
@steps_options
def timers(
    output: Output,
    *,
    logs: tuple[Path, ...],
    by: Literal["rank", "call"] | None,
    collective: tuple[str, ...],
    warm_up: int,
    steps: StepOptions,
    select: Selection,
) -> None:
    """How long the timed stages take on each rank, how much the ranks differ, and which rank the others wait for.

    A LOG is a timer_rank*.log or a folder that contains them. FILE ends in .csv, .json, .md, .parquet or .txt for the
    table, in .png, .svg or .pdf for the timeline over the ranks.
    """
    from nvprof_kit._api.sources import open_timers

    with progress() as say:
        say("reading logs and comparing ranks")
        opened = open_timers(*logs)
        output.spare(opened.sources)
        for log in logs:
            expect(log, (TIMERS,), "a timer_rank*.log of global_timer, or the folder that holds them")
        result = opened.timers(by, collective=collective, warm_up=warm_up, steps=steps)
    output.write_results([result], select)
