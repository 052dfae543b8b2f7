"""The verbs that write a capture out: a page, plots, a trace for other viewers."""

from __future__ import annotations

from typing import Any

from nvprof_kit._api.capture import Capture
from nvprof_kit._api.capture import open as open_capture
from nvprof_kit._cli.output import Output, open_input, progress
from nvprof_kit._cli.verb import OUT, pop_opening
from nvprof_kit._result import formats
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect
from nvprof_kit.errors import UsageError


@OUT.verb(
    "nvprof-kit report run.sqlite -o run.html",
    also=(Capture.report, open_capture),
    without=("model",),
    writes={".html": "html", ".htm": "html"},
)
def report(output: Output, captures: tuple[str, ...], **options: Any) -> None:
    """Write one self-contained HTML page: findings, layers, timeline of the steps, kernels, idle causes.

    With several CAPTUREs, the page shows the details of the first ones and compares all with the first. It stays below
    8 MB and loads nothing from the network.
    """
    first, *more_captures = captures
    for capture in more_captures:
        expect(capture, CAPTURES, NEEDED)
    output.spare(captures)
    with progress() as report_stage:
        report_stage(f"reading {', '.join(captures)} and writing the page")
        page = open_input(output, first, **pop_opening(options)).report(*more_captures, **options)
    output.write_document(page)


@OUT.verb(
    "nvprof-kit plot run.sqlite --view timeline -o step.svg",
    also=(Capture.plot, open_capture),
    without=("model", "kernel_rules"),
    writes={f".{name}": name for name in formats.PICTURES},
)
def plot(output: Output, captures: tuple[str, ...], **options: Any) -> None:
    """Plot layers, or the timeline of a step, in colors that readers with color blindness can tell apart.

    layers: a bar per layer, by phase. timeline: one step over time, layers above the GPU's streams, with idle gaps.
    """
    if len(captures) > 1:
        raise UsageError(f"a plot shows one capture, not {len(captures)}; plot them one by one")
    with progress() as report_stage:
        report_stage(f"reading and drawing {captures[0]}")
        result = open_input(output, captures[0], **pop_opening(options)).plot(**options)
        output.write_results([result])


@OUT.verb(
    "nvprof-kit export run.sqlite --step 12 -o step.json.gz",
    also=(Capture.export, open_capture),
    without=("model", "kernel_rules"),
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
