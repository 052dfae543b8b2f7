"""``nvprof-kit export``: convert a capture for trace viewers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from nvprof_kit._cli.inputs import rules_option, steps_options
from nvprof_kit._cli.output import Reading, reading_into
from nvprof_kit._cli.progress import progress

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions

_FORMS = {".json.gz": "json.gz", ".gz": "json.gz", ".json": "json"}
"""Copy of `nvprof_kit._report.export.trace_events.BY_SUFFIX`, which is slow to import."""


@click.command(short_help="Export for a trace viewer: Perfetto, chrome://tracing.")
@reading_into(_FORMS, named=True)
@click.option("--step", type=int, help="Only this step; default: the whole capture.")
@steps_options
@rules_option
def export(request: Reading, step: int | None, steps: StepOptions, rules: str | None) -> None:
    """Export a trace with layers, phases, streams and idle gaps as tracks, for the Perfetto UI and chrome://tracing.

    Several CAPTUREs must be ranks of one job; the trace shows them side by side on one clock.

    FILE ends in .json.gz or .json.
    """
    file_format: Any = request.output.form
    opened = request.open(request.captures[0], rules)
    with progress() as report:
        if len(request.captures) == 1:
            report(f"reading {request.captures[0]} and writing it as {file_format}")
            return request.output.write_document(opened.perfetto(step=step, form=file_format, steps=steps))
        from nvprof_kit._api.job import open_job

        report("aligning the ranks' clocks")
        job = open_job(request.captures, domain=opened.domain, rules=opened._rules)
        report(f"reading {len(request.captures)} captures and writing them as {file_format}")
        request.output.write_document(job.perfetto(step=step, form=file_format, steps=steps))
