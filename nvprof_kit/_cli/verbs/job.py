"""``nvprof-kit ranks``: compare the ranks of a job: which rank is late, in which layer, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from nvprof_kit._api.job import map_captures, open_job
from nvprof_kit._cli.verb import JOB, WITH_PAGE, LazyGroup, Output, progress
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect
from nvprof_kit._trace.files.process import keep_freed_memory, switch_threads_often
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nvprof_kit._result.result import RowOptions

JobView = Literal[
    "waits", "charges", "layers", "clocks", "groups", "bubbles", "micro-batches", "critical-path", "what-if"
]


class _Ranks(LazyGroup):
    """Supports both ``ranks CAPTURE…`` and ``ranks map CAPTURE…``."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Pass any first word that is no verb to ``compare``."""
        if args and not (args[0].isalpha() and args[0] in self.commands):
            args = ["compare", *args]
        return super().parse_args(context, args)


@click.group(cls=_Ranks)
def ranks() -> None:
    """Compare the ranks of a job: which rank is late, in which layer, and what the waiting costs.

    nvprof-kit ranks [OPTIONS] CAPTURE|FOLDER...

    nvprof-kit ranks map -o MAPS CAPTURE|FOLDER...

    See `nvprof-kit ranks compare --help` for the options of the first form.
    """


JOB.add(ranks)


@JOB.verb(
    "nvprof-kit ranks run-rank*.sqlite",
    also=(open_job,),
    without=("ranks", "executor", "notify"),
    writes=WITH_PAGE,
    under=ranks,
)
def compare(
    output: Output,
    captures: tuple[str, ...],
    *,
    view: JobView | None = None,
    rank: Sequence[str] = (),
    timeline: str = "",
    domain: str | None,
    rules: str | None,
    **rows: Unpack[RowOptions],
) -> None:
    """Compare the ranks of a job: which rank is late, in which layer, and what the waiting costs.

    Takes the captures of one run (each with one or more ranks), folders of them, or a folder of maps written by
    `nvprof-kit ranks map -o FOLDER CAPTURE|FOLDER...` (see `nvprof-kit ranks map --help`).

    An .html is a page to open in a browser, a .json has everything, a .csv, .md or .parquet one table.

    Options:
        view: One table only; csv, md and parquet default to waits.
        rank: FILE=N, the rank of a capture that does not contain its rank. Repeatable.
        timeline: Ranks on the timeline of the page, separated by commas.
    """
    output.spare([*captures, *([rules] if rules else [])])
    for capture in captures:
        expect(capture, CAPTURES, f"{NEEDED}; or a folder of them")
    with progress() as report:
        job = open_job(
            captures,
            domain=domain,
            rules=rules,
            ranks=_ranks_by_file(rank),
            notify=lambda capture: report(f"mapping {capture}"),
        )
        report("comparing ranks")
        if output.data_format == "html":
            command = " ".join(["nvprof-kit ranks", *captures[:4], *(["…"] if len(captures) > 4 else [])])
            if not re.fullmatch(r"(\d{1,9}(,\d{1,9})*)?", timeline):
                raise UsageError(f"--timeline {timeline}: needed numbers by commas, as in 0,17,300")
            numbers = [int(number) for number in timeline.split(",") if number]
            page = job.report(timeline=numbers, title=", ".join(captures[:4]), command=command)
            return output.write_document(page)
        answer = job.answer()
    output.write_results([(answer if view is None else answer.only(view)).selected(**rows)])


@JOB.verb(
    "nvprof-kit ranks map -o maps/ captures/",
    also=(map_captures,),
    without=("ranks", "executor", "notify"),
    name="map",
    under=ranks,
)
def map_(captures: tuple[str, ...], *, output: str = "", rank: Sequence[str] = (), **options: Any) -> None:
    """Condense captures to maps: what the comparison of ranks needs, a few megabytes of Parquet each.

    A map is reused while its capture is unchanged. On a cluster each node maps its own: srun nvprof-kit ranks map -o
    /shared/maps /local/captures; then nvprof-kit ranks /shared/maps. Tasks that see the same captures each name some.

    Options:
        output: Folder for the maps.
        rank: FILE=N, the rank of a capture that does not contain its rank. Repeatable.
    """
    if not output:
        raise UsageError("no folder for the maps; needed: nvprof-kit ranks map -o FOLDER CAPTURE...")
    keep_freed_memory()  # before NumPy is imported
    switch_threads_often()
    with progress() as report:
        names = map_captures(
            captures, output, ranks=_ranks_by_file(rank), notify=lambda capture: report(f"mapping {capture}"), **options
        )
    click.echo(f"{output}: {len(names)} maps", err=True)


def _ranks_by_file(pairs: Sequence[str]) -> dict[str, int]:
    """The ranks of ``--rank FILE=N``."""
    ranks = {}
    for pair in pairs:
        file, _, number = pair.rpartition("=")
        if not file or not re.fullmatch(r"\d{1,9}", number):
            raise UsageError(f"--rank {pair}: needed FILE=N, as in --rank run.sqlite=3")
        ranks[file] = int(number)
    return ranks
