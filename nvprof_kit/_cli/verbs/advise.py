"""``nvprof-kit advise``: what could be made faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import kernel_rules, rules_option, selecting, steps_options, top_option
from nvprof_kit._cli.output import Reading, reading
from nvprof_kit._cli.progress import each
from nvprof_kit.errors import NvprofKitError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._api.job import Job
    from nvprof_kit._result.selection import Selection


@click.command(short_help="Find what could be made faster, with evidence and fixes.")
@reading()
@top_option(10, "Findings to print")
@selecting()
@steps_options
@rules_option
@kernel_rules
def advise(
    request: Reading, *, top: int, select: Selection, steps: StepOptions, rules: str | None, rules_path: Path | None
) -> None:
    """Find what could be made faster, ranked by the time it could save: evidence, layer, place in Nsight, and fix.

    With the captures of all ranks of a run, the slowest rank comes first.
    """
    job = _job(request, rules)
    results = each(
        request.captures, lambda one: request.open(one, rules, rules_path).advise(top=top, steps=steps, job=job)
    )
    request.output.write_results(results, select)


def _job(request: Reading, rules: str | None) -> Job | None:
    """The captures as one job, if they are the ranks of one run."""
    if len(request.captures) < 2:
        return None
    from nvprof_kit._api.capture import domain_of, read_rules
    from nvprof_kit._api.job import open_job

    try:
        named = read_rules(rules)
        job = open_job(request.captures, domain=domain_of(named, request.domain), rules=named)
        return job if job.verdict.rank is not None else None
    except NvprofKitError:  # the captures are not ranks of one run: analyze each separately
        return None
