"""``nvprof-kit ranks``: across the ranks of a job, who is late, in which layer, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import rules_option, selecting
from nvprof_kit._cli.output import NEEDED, Output, domain_option, named_domain, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit._report.warnings import in_order
from nvprof_kit._trace.kinds import CAPTURES, FLIGHT, INSPECTOR, expect
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.ranks.answer import RanksAnswer
    from nvprof_kit._report.selection import Selection

VIEWS = ("waits", "charges", "layers", "clocks", "critical-path", "what-if")


class _Group(click.Group):
    """``ranks CAPTURE…`` and ``ranks map CAPTURE…`` in one: only the word ``map`` is a command."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Give every other first word to the command that compares."""
        if args and args[0] not in self.commands:
            args = ["compare", *args]
        return super().parse_args(context, args)


@click.group(cls=_Group, short_help="Across ranks: who is late, in which layer, and what it costs.")
def ranks() -> None:
    """Across the ranks of a job: who is late, in which layer, and what it costs.

    nvprof-kit ranks [OPTIONS] CAPTURE|FOLDER...

    nvprof-kit ranks map -o MAPS CAPTURE|FOLDER...

    See `nvprof-kit ranks compare --help` for the options of the first form.
    """


_captures = click.argument("captures", metavar="CAPTURE|FOLDER...", nargs=-1, required=True)
_ranks = click.option(
    "--rank", "given", metavar="FILE=N", multiple=True, help="Rank of a capture that does not tell it."
)
_workers = click.option("--workers", type=click.IntRange(min=1), help="Processes that map; default: one a processor.")


@ranks.command()
@_captures
@click.option(
    "--view", type=click.Choice(VIEWS), help="One table alone, also for csv, md and parquet; default there: waits."
)
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Lines of each table.")
@click.option("--maps", metavar="MAPS", help="Folder where maps are kept and reused while their capture is unchanged.")
@_ranks
@_workers
@selecting()
@domain_option
@rules_option
@writing(plot=False)
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
    domain: str,
    rules: str | None,
) -> None:
    """Across the ranks of a job: who is late, in which layer, and what it costs.

    Takes the captures of one run, a rank or more each, folders of them, or a folder of maps that
    `nvprof-kit ranks map -o MAPS CAPTURE|FOLDER...` made (see `nvprof-kit ranks map --help`).

    FILE ends in .json for everything, in .csv, .md or .parquet for one table, in .txt for the report.
    """
    from nvprof_kit._api.capture import domain_of, read_rules
    from nvprof_kit._api.job import open_job

    output.spare([*captures, *([rules] if rules else [])])
    for capture in captures:
        expect(capture, (*CAPTURES, FLIGHT, INSPECTOR), f"{NEEDED}; or a folder of them")
    named = read_rules(rules)
    with progress() as say:
        job = open_job(
            captures,
            maps=maps,
            domain=domain_of(named, named_domain(domain)),
            rules=named,
            ranks=_given(given),
            workers=workers,
            done=lambda capture: say(f"mapping {capture}"),
        )
        say("comparing ranks")
        answer = job.answer()
    _write(answer, output, view, top=top, select=select, captures=captures)


def _write(
    answer: RanksAnswer, output: Output, view: str | None, *, top: int, select: Selection, captures: tuple[str, ...]
) -> None:
    from nvprof_kit._report.export import tables
    from nvprof_kit._report.export.answer import json_answer
    from nvprof_kit._report.export.bounds import bounded
    from nvprof_kit._report.text.ranks import ranks_report, table_of
    from nvprof_kit._report.text.terminal import warning_lines

    if select.budget is not None and output.form != "json":
        raise UsageError("--budget bounds a json answer; add --format json, or use --max-rows")
    if view in ("critical-path", "what-if") and answer.replay_error is None:
        raise UsageError(
            f"{answer.collectives:,} matched collectives: a critical path and what-if need 1 to 40,000; "
            "name the captures of fewer ranks"
        )
    warnings = in_order(answer.warnings)
    if output.form == "json" and view is None:
        output.write(_whole_answer(answer, select, captures))
    elif output.form == "json":
        output.write(json_answer(f"ranks-{view}", select.of(answer.table(str(view))), warnings, captures, select))
    elif output.form == "table" and view is None:
        output.print(ranks_report(answer, top))
    elif output.form == "table":
        output.print([table_of(select.of(answer.table(str(view))).head(top)), *warning_lines(warnings)])
    else:
        found = bounded(select.of(answer.table(view or "waits")), select)
        data = tables.encode(found.rows, output.form) + (tables.quoted(warnings) if output.form == "md" else b"")
        beside = () if output.form == "md" else warnings
        output.write(data, (*beside, *((found.sentence,) if found.left_out else ())))


def _whole_answer(answer: RanksAnswer, select: Selection, captures: tuple[str, ...]) -> bytes:
    """All tables as one json answer, each with as many rows as the bound leaves."""
    from nvprof_kit._report.export import schemas
    from nvprof_kit._report.export.answer import records
    from nvprof_kit._report.export.bounds import bounded

    chosen = select.each({view: answer.table(view) for view in VIEWS})
    most = select.max_rows
    while True:
        found = {view: bounded(table, select, most) for view, table in chosen.items()}
        missing = {str(name): view for view, one in found.items() for name in one.rows if one.rows[name].isna().any()}
        cut = {view: one.truncated for view, one in found.items() if one.left_out}
        told = answer.to_dict() | {
            "warnings": list(in_order(answer.warnings)),
            "sources": list(captures),
            "unknown": {name: schemas.reasons(f"ranks-{view}", [name])[name] for name, view in missing.items()},
            "truncated": cut or None,
            **{view.replace("-", "_"): records(one.rows) for view, one in found.items()},
        }
        data = (json.dumps(told, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")
        longest = max(len(one.rows) for one in found.values())
        if select.budget is None or len(data) <= select.budget or not longest:
            return data
        most = longest * min(select.budget * 9 // 10, len(data) // 2) // len(data)


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
    help="Map on the workers of a Dask cluster, which see the captures and MAPS under the same paths.",
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
    domain: str,
    rules: str | None,
) -> None:
    """Condense captures to maps: a few megabytes of Parquet each, all that comparing ranks needs.

    A map is reused while its capture is unchanged. On a cluster each node maps its own:
    srun nvprof-kit ranks map -o /shared/maps /local/captures; then nvprof-kit ranks /shared/maps.
    """
    from nvprof_kit._api.capture import domain_of, read_rules
    from nvprof_kit._api.job_maps import map_captures

    named = read_rules(rules)
    with progress() as say:
        names = map_captures(
            captures,
            maps,
            domain=domain_of(named, named_domain(domain)),
            rules=named,
            ranks=_given(given),
            workers=workers,
            dask=dask,
            done=lambda capture: say(f"mapping {capture}"),
        )
    click.echo(f"{maps}: {len(names)} maps", err=True)


def _given(pairs: tuple[str, ...]) -> dict[str, int]:
    """The ranks of ``--rank FILE=N``.

    Raises:
        UsageError: A pair is none.
    """
    told = {}
    for pair in pairs:
        name, found, number = pair.rpartition("=")
        if not found or not number.isdecimal():
            raise UsageError(f"--rank {pair}: needed FILE=N, as in --rank run.sqlite=3")
        told[name] = int(number)
    return told
