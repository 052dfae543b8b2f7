"""``nvprof-kit export``: convert a capture for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from nvprof_kit._cli.inputs import rules_option, steps_options
from nvprof_kit._cli.output import Reading, reading_into
from nvprof_kit._cli.progress import progress
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions

_FORMS = {
    ".json.gz": "json.gz",
    ".pb.gz": "pprof",
    ".gz": "json.gz",
    ".json": "json",
    ".pftrace": "pftrace",
    ".perfetto-trace": "pftrace",
    ".folded": "folded",
}
"""Copy of `nvprof_kit._report.export.forms.BY_SUFFIX`, which is slow to import."""

_STACKS = ("pprof", "folded")


@click.command(short_help="Export for another viewer: Perfetto, chrome://tracing, pprof.")
@reading_into(_FORMS, named=True)
@click.option(
    "--to", type=click.Choice(["perfetto", "pprof"]), help="Target viewer, unless the suffix or format says it."
)
@click.option("--step", type=int, help="Only this step; default: the whole capture.")
@steps_options
@rules_option
def export(request: Reading, to: str | None, step: int | None, steps: StepOptions, rules: str | None) -> None:
    """Export a trace with layers, phases, streams and idle gaps as tracks, for the Perfetto UI and chrome://tracing; or
    GPU time as stacks of modules, phase and kernel, for pprof and other flame graph viewers.

    Several CAPTUREs must be ranks of one job; the trace shows them side by side on one clock.

    FILE ends in .pftrace, .perfetto-trace, .json.gz or .json; or in .pb.gz or .folded.
    """
    form: Any = _form(request, to)
    if len(request.captures) > 1:
        return _ranks(request, form, step, steps, rules)
    (capture,) = request.captures
    with progress() as say:
        say(f"reading {capture} and writing it as {form}")
        opened = request.open(capture, rules)
        make: Any = opened.pprof if form in _STACKS else opened.perfetto
        request.output.write_document(make(step=step, form=form, steps=steps))


def _ranks(request: Reading, form: Any, step: int | None, steps: StepOptions, rules: str | None) -> None:
    """Write the trace of several ranks.

    Raises:
        UsageError: The format contains stacks, or the captures are not from one job.
    """
    from nvprof_kit._api.job import open_job

    if form in _STACKS:
        raise UsageError(
            f"{form} holds the stacks of one capture, not of {len(request.captures)}; export them one by one"
        )
    first = request.open(request.captures[0], rules)
    with progress() as say:
        say("aligning the ranks' clocks")
        job = open_job(request.captures, domain=first.domain, rules=first._rules)
        say(f"reading {len(request.captures)} captures and writing them as {form}")
        request.output.write_document(job.perfetto(step=step, form=form, steps=steps))


def _form(request: Reading, to: str | None) -> str:
    """The requested format.

    Raises:
        UsageError: The requested program does not read this format.
    """
    form = request.output.form
    if to == "pprof" and form not in _STACKS:
        if request.output.path is not None:
            raise UsageError(f"--to pprof, and {request.output.path} is a trace; needed a file that ends in .pb.gz")
        return _STACKS[0]
    if to == "perfetto" and form in _STACKS:
        held = request.output.path or form
        raise UsageError(f"--to perfetto, and {held} holds stacks; needed a file that ends in .pftrace")
    return form
