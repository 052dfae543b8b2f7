"""``nvprof-kit ranks``: compare the ranks of a job: which rank is late, in which layer, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import rules_option, selecting, top_option
from nvprof_kit._cli.output import Output, domain_option, named_domain, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._ranks.answer import Ranks
    from nvprof_kit._result.selection import Selection

VIEWS = ("waits", "charges", "layers", "clocks", "groups", "bubbles", "micro-batches", "critical-path", "what-if")


class _Group(click.Group):
    """Supports both ``ranks CAPTURE…`` and ``ranks map CAPTURE…``: only the word ``map`` is a command."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Pass any other first word to ``compare``."""
        if args and args[0] not in self.commands:
            args = ["compare", *args]
        return super().parse_args(context, args)


@click.group(cls=_Group, short_help="Across ranks: who is late, in which layer, and what it costs.")
def ranks() -> None:
    """Compare the ranks of a job: which rank is late, in which layer, and what the waiting costs.

    nvprof-kit ranks [OPTIONS] CAPTURE|FOLDER...

    nvprof-kit ranks map -o MAPS CAPTURE|FOLDER...

    See `nvprof-kit ranks compare --help` for the options of the first form.
    """


_captures = click.argument("captures", metavar="CAPTURE|FOLDER...", nargs=-1, required=True)
_ranks = click.option(
    "--rank",
    "given",
    metavar="FILE=N",
    multiple=True,
    help="Rank of a capture that does not contain its rank. Repeatable.",
)
_workers = click.option(
    "--workers", type=click.IntRange(min=1), help="Threads that read captures; default: one per processor."
)


@ranks.command()
@_captures
@click.option("--view", type=click.Choice(VIEWS), help="One table only; csv, md and parquet default to waits.")
@top_option(10, "Rows to print per table")
@click.option("--maps", metavar="MAPS", help="Folder in which to keep maps, and reuse those of unchanged captures.")
@_ranks
@_workers
@selecting(fold=True)
@click.option(
    "--timeline", "shown", metavar="RANKS", default="", help="Ranks on the timeline of the page, separated by commas."
)
@domain_option
@rules_option
@writing("html", plot=True)
def compare(
    output: Output,
    *,
    captures: tuple[str, ...],
    view: str | None,
    top: int,
    maps: str | None,
    given: tuple[str, ...],
    workers: int | None,
    select: Selection,
    shown: str,
    domain: str,
    rules: str | None,
) -> None:
    """Compare the ranks of a job: which rank is late, in which layer, and what the waiting costs.

    Takes the captures of one run (each with one or more ranks), folders of them, or a folder of maps written by
    `nvprof-kit ranks map -o MAPS CAPTURE|FOLDER...` (see `nvprof-kit ranks map --help`).

    FILE ends in .html for a page to open in a browser, in .json for everything, in .csv, .md or .parquet for one table,
    in .txt for the report.
    """
    from nvprof_kit._api.capture import domain_of, read_rules
    from nvprof_kit._api.job import open_job

    output.spare([*captures, *([rules] if rules else [])])
    for capture in captures:
        expect(capture, CAPTURES, f"{NEEDED}; or a folder of them")
    named = read_rules(rules)
    with progress() as report:
        job = open_job(
            captures,
            maps=maps,
            domain=domain_of(named, named_domain(domain)),
            rules=named,
            ranks=_given(given),
            workers=workers,
            done=lambda capture: report(f"mapping {capture}"),
        )
        report("comparing ranks")
        if output.form == "html":
            command = " ".join(["nvprof-kit ranks", *captures[:4], *(["…"] if len(captures) > 4 else [])])
            page = job.page(timeline=_numbers(shown), title=", ".join(captures[:4]), command=command)
            return output.write_document(page)
        answer = job.answer(top)
    _check_available(answer, view)
    output.write_results([replace(answer if view is None else answer.only(view), select=select)])


def _check_available(answer: Ranks, view: str | None) -> None:
    """Reject a table that is only available for a limited number of collectives.

    Raises:
        UsageError: The job has too many collectives, or none.
    """
    from nvprof_kit._ranks.answer import REPLAYED

    if view in REPLAYED and answer.not_replayed:
        raise UsageError(f"no table {view}: {answer.not_replayed}")


@ranks.command(name="map")
@_captures
@click.option(
    "-o",
    "--output",
    "maps",
    metavar="MAPS",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the maps.",
)
@_ranks
@_workers
@click.option(
    "--dask",
    metavar="SCHEDULER",
    help="Map on the workers of a Dask cluster that see the captures and MAPS under the same paths.",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Map only every N-th capture, beginning with the I-th (from 0), to share the work between tasks.",
)
@domain_option
@rules_option
def map_(
    *,
    captures: tuple[str, ...],
    maps: Path,
    given: tuple[str, ...],
    workers: int | None,
    dask: str | None,
    part: str | None,
    domain: str,
    rules: str | None,
) -> None:
    """Condense captures to maps: what the comparison of ranks needs, a few megabytes of Parquet each.

    A map is reused while its capture is unchanged. On a cluster each node maps its own: srun nvprof-kit ranks map -o
    /shared/maps /local/captures; then nvprof-kit ranks /shared/maps. Tasks that see the same captures can share the
    work: --part $SLURM_PROCID/$SLURM_NTASKS.
    """
    from nvprof_kit._trace.files.own_process import keep_freed_memory, switch_threads_often

    keep_freed_memory()  # before NumPy is imported
    switch_threads_often()
    from nvprof_kit._api.job import map_captures

    with progress() as report:
        names = map_captures(
            captures,
            maps,
            domain=named_domain(domain),
            rules=rules,
            ranks=_given(given),
            workers=workers,
            dask=dask,
            part=_part(part),
            done=lambda capture: report(f"mapping {capture}"),
        )
    click.echo(f"{maps}: {len(names)} maps", err=True)


def _numbers(text: str) -> list[int]:
    """The ranks of ``--timeline RANKS``.

    Raises:
        UsageError: An item is not a number.
    """
    named = [number.strip() for number in text.split(",") if number.strip()]
    wrong = [number for number in named if not number.isdecimal()]
    if wrong:
        raise UsageError(f"--timeline {text}: {wrong[0]!r} is no rank; needed numbers by commas, as in 0,17,300")
    return [int(number) for number in named]


def _part(text: str | None) -> tuple[int, int]:
    """Parse ``--part I/N``.

    Raises:
        UsageError: The text is not of this form.
    """
    number, separator, of = (text or "0/1").partition("/")
    if not separator or not number.isdecimal() or not of.isdecimal() or int(number) >= int(of):
        raise UsageError(f"--part {text}: needed I/N with I from 0 to N - 1, as in --part 0/8")
    return int(number), int(of)


_DIGITS = 9
"""More ranks than any job has."""


def _given(pairs: tuple[str, ...]) -> dict[str, int]:
    """The ranks of ``--rank FILE=N``.

    Raises:
        UsageError: A pair is not of this form.
    """
    parsed = {}
    for pair in pairs:
        name, separator, number = pair.rpartition("=")
        if not separator or not number.isdecimal() or len(number) > _DIGITS:
            raise UsageError(f"--rank {pair}: needed FILE=N, as in --rank run.sqlite=3")
        parsed[name] = int(number)
    return parsed
