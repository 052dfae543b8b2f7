"""The verbs that read captures, and those that write one out: a page, plots, a trace for other viewers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from nvprof_kit._api.capture import Capture
from nvprof_kit._api.capture import open as open_capture
from nvprof_kit._cli.verb import OUT, READ, WITHOUT_PLOT, Output, open_input, pop_opening, progress
from nvprof_kit._result import formats
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect
from nvprof_kit.errors import NvprofKitError, UsageError

if TYPE_CHECKING:
    from nvprof_kit._result.result import Result


READ.question(Capture.layers, "nvprof-kit layers run.sqlite --depth 3 -o layers.csv")(Capture.layers)
READ.question(Capture.breakdown, "nvprof-kit breakdown run.sqlite --view idle", without=("model",))(Capture.breakdown)


@READ.question(Capture.summary, "nvprof-kit summary run.sqlite --view kernel --top 20", without=("model",))
def summary(capture: Capture, view: tuple[Any, ...], **options: Any) -> Result:
    return capture.summary(view, **options)


@READ.question(Capture.advise, "nvprof-kit advise run.sqlite", without=("fold", "job", "model"))
def advise(capture: Capture, **options: Any) -> Result:
    context = click.get_current_context()
    if "nvprof_kit.job" not in context.meta:  # the captures of the command as one job, opened for the first of them
        context.meta["nvprof_kit.job"] = None
        captures = context.params["captures"]
        if len(captures) > 1:
            from nvprof_kit._api.job import open_job

            with suppress(NvprofKitError):  # they are not ranks of one run: each is looked at alone
                job = open_job(captures, domain=capture.domain, rules=capture._rules)
                context.meta["nvprof_kit.job"] = job if job.verdict.rank is not None else None
    return capture.advise(job=context.meta["nvprof_kit.job"], **options)


class _Sides(click.Command):
    """A command whose option ``--vs`` takes all words up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat ``--vs`` before each of its words."""
        parsed: list[str] = []
        after_vs = False
        for word in args:
            if word.startswith("-"):
                after_vs = word == "--vs"
            elif after_vs and parsed[-1:] != ["--vs"]:
                parsed.append("--vs")
            parsed.append(word)
        return super().parse_args(ctx, parsed)


@READ.verb(
    "nvprof-kit diff before.sqlite after.sqlite --fail-on step:+5%",
    also=(Capture.diff, open_capture),
    without=("base", "model"),
    writes=WITHOUT_PLOT,
    cls=_Sides,
)
def diff(output: Output, captures: tuple[str, ...], *, vs: Sequence[str] = (), **options: Any) -> None:
    """Compare two captures, or several runs of each program, by layer, phase and kernel class.

    A difference counts as a change only if it exceeds the noise between steps and runs. Several runs a side measure
    the noise between runs; with one, it is assumed.

    TARGET is step, phase:NAME, class:NAME, or a layer, in which * matches any text, with or without a phase:
    'model.layers.* backward'. Exit 1 if a gate fails or cannot be decided, 2 if the captures cannot be compared; with
    one run a side, a gate passes if only the assumed noise leaves it undecided. --format md writes a report for a
    pull request.

    Options:
        vs: Several runs of NEW, after several of BASE.
    """
    if not vs and len(captures) != 2:
        raise UsageError("diff takes two captures, BASE NEW, or several runs of each: BASE1 BASE2 --vs NEW1 NEW2")
    base, new = (captures, vs) if vs else (captures[:1], captures[1:])
    opening = pop_opening(options)
    runs = [open_input(output, path, **opening) for path in (*base, *new)]
    with progress() as report:
        report(f"comparing {base[0]} with {new[0]}, step by step")
        result = runs[0].diff(runs[len(base) :], base=runs[1 : len(base)], **options)
    output.write_results([result])
    if not result.held:
        raise click.exceptions.Exit(1)


READ.question(Capture.flops, "nvprof-kit flops run.sqlite --counts run.flops.json", without=("model",))(Capture.flops)
READ.question(Capture.metrics, "nvprof-kit metrics run.sqlite --depth 3", nsys=True, without=("model",))(
    Capture.metrics
)


@OUT.verb(
    "nvprof-kit report run.sqlite -o run.html",
    also=(Capture.report, open_capture),
    without=("other", "model"),
    writes={".html": "html", ".htm": "html"},
)
def report(output: Output, captures: tuple[str, ...], **options: Any) -> None:
    """Write one self-contained HTML page: findings, layers, timeline of the steps, kernels, idle causes.

    With two CAPTUREs, the page has both and compares them. It loads nothing from the network.
    """
    if len(captures) > 2:
        raise UsageError(f"a page is about a capture, or compares two, not {len(captures)}")
    for capture in captures[1:]:
        expect(capture, CAPTURES, NEEDED)
    output.spare(captures)
    with progress() as report_stage:
        report_stage(f"reading {', '.join(captures)} and writing the page")
        page = open_input(output, captures[0], **pop_opening(options)).report(*captures[1:], **options)
    output.write_document(page)


@OUT.verb(
    "nvprof-kit plot run.sqlite --steps 12 -o step.svg",
    also=(Capture.plot, open_capture),
    without=("model",),
    writes={f".{name}": name for name in formats.PICTURES},
)
def plot(output: Output, captures: tuple[str, ...], **options: Any) -> None:
    """Draw one step over time: layers above the GPU's streams, with idle gaps.

    layers, ranks, memory and others draw their own tables: nvprof-kit layers run.sqlite -o layers.png.
    """
    if len(captures) > 1:
        raise UsageError(f"a plot shows one capture, not {len(captures)}; plot them one by one")
    with progress() as report_stage:
        report_stage(f"reading and drawing {captures[0]}")
        result = open_input(output, captures[0], **pop_opening(options)).plot(**options)
        output.write_results([result])


@OUT.verb(
    "nvprof-kit export run.sqlite --steps 12 -o step.json.gz",
    also=(Capture.export, open_capture),
    without=("model",),
    writes={".json.gz": "json.gz", ".gz": "json.gz", ".json": "json"},
)
def export(output: Output, captures: tuple[str, ...], **options: Any) -> None:
    """Export a trace with layers, phases, streams and idle gaps as tracks, for the Perfetto UI.

    Several CAPTUREs must be ranks of one job; the trace shows them side by side on one clock.
    """
    opened = open_input(output, captures[0], **pop_opening(options))
    with progress() as report_stage:
        if len(captures) == 1:
            report_stage(f"reading {captures[0]} and writing it as {output.data_format}")
            return output.write_document(opened.export(data_format=output.data_format, **options))
        from nvprof_kit._api.job import open_job

        report_stage("aligning the ranks' clocks")
        job = open_job(captures, domain=opened.domain, rules=opened._rules)
        report_stage(f"reading {len(captures)} captures and writing them as {output.data_format}")
        output.write_document(job.export(data_format=output.data_format, **options))
