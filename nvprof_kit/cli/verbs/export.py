"""``nvprof-kit export``: a capture for another program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import opened, rules_option
from nvprof_kit.cli.output import Reading, reading_into
from nvprof_kit.cli.progress import progress
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules


@click.command(short_help="The capture for another viewer: Perfetto, chrome://tracing.")
@reading_into({".gz": "json.gz", ".json": "json"})
@click.option("--to", type=click.Choice(["perfetto"]), default="perfetto", show_default=True, help="Which program.")
@click.option("--step", type=int, help="Only what ran in this step; default: the whole capture.")
@rules_option
def export(asked: Reading, to: str, step: int | None, rules: Rules | None) -> None:
    """A trace with layers, phases, streams and idle gaps as tracks, for the Perfetto UI and chrome://tracing.

    FILE ends in .json.gz or .json.
    """
    if len(asked.captures) > 1:
        raise UsageError(f"a trace shows one capture, not {len(asked.captures)}; export them one by one")
    from nvprof_kit.analysis.attribution.attribution import attribute
    from nvprof_kit.analysis.attribution.steps import require_step, step_times
    from nvprof_kit.analysis.timeline import OPTIONAL, timeline
    from nvprof_kit.report.export.perfetto import perfetto_trace

    (capture,) = asked.captures
    with progress() as say:
        say(f"reading {capture}")
        trace = opened(capture, asked.domain, rules, OPTIONAL)
        say(f"attributing {len(trace.ops):,} operations")
        attribution = attribute(trace)
        if step is not None:
            require_step(step_times(trace, attribution), step, capture)
        say(f"writing {len(trace.ops):,} operations for {to}")
        made = perfetto_trace(timeline(trace, attribution, step), trace.info, asked.output.form)
    asked.output.write(made)
