"""``nvprof-kit plot``: a picture for a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import opened, rules_option
from nvprof_kit.cli.output import Reading, reading_into
from nvprof_kit.cli.progress import progress
from nvprof_kit.errors import UsageError
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nvprof_kit.analysis.foreign.rules import Rules
    from nvprof_kit.trace.schema import Trace

VIEWS = ("layers", "timeline", "steps", "tree", "queue")


@click.command(short_help="A picture: layers, timeline, steps, tree or queue, as png, svg or pdf.")
@reading_into({f".{name}": name for name in plots.FORMATS})
@click.option("--view", type=click.Choice(VIEWS), default="layers", show_default=True, help="What to draw.")
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model; default: as many as can be read.")
@click.option("--step", type=int, help="Step of the timeline; default: the one of median length.")
@rules_option
def plot(asked: Reading, view: str, depth: int | None, step: int | None, rules: Rules | None) -> None:
    """A picture of a capture, labelled and in colours that colour-blind readers tell apart.

    layers: a bar per layer, by phase. timeline: a step in time, layers over the GPU's streams, idle gaps in sight.
    steps: a bar per step. tree: the model, each layer as wide as its time. queue: how many launched operations wait for
    the GPU through the step of median length. FILE ends in .png, .svg or .pdf.
    """
    if len(asked.captures) > 1:
        raise UsageError(f"a plot shows one capture, not {len(asked.captures)}; plot them one by one")
    if step is not None and view != "timeline":
        raise UsageError(f"--step is for --view timeline; {view} shows every step")
    from nvprof_kit.analysis import timeline
    from nvprof_kit.analysis.breakdown import breakdown

    (capture,) = asked.captures
    with progress() as say:
        say(f"reading {capture}")
        optional = {"timeline": timeline.OPTIONAL, "queue": breakdown.OPTIONAL}.get(view, ())
        trace = opened(capture, asked.domain, rules, optional)
        say(f"drawing {len(trace.ops):,} operations")
        figure, warnings = _figure(trace, view, depth, step)
        made = plots.encode(figure, asked.output.form)
    asked.output.write(made, warnings)


def _figure(trace: Trace, view: str, depth: int | None, step: int | None) -> tuple[Figure, tuple[str, ...]]:
    """The picture, and what is uncertain about it."""
    if view == "timeline":
        return _timeline(trace, depth, step), trace.info.warnings
    if view == "queue":
        from nvprof_kit.analysis.breakdown.breakdown import breakdown
        from nvprof_kit.report.plots.queue import queue_figure

        made = breakdown(trace)
        return queue_figure(made), made.warnings
    from nvprof_kit.analysis.attribution.attribution import attribute
    from nvprof_kit.analysis.layers.layers import LayersOptions, layers

    attribution = attribute(trace)
    result = layers(trace, LayersOptions(by_step=view == "steps"), attribution)
    if view == "layers":
        from nvprof_kit.report.plots.layers import layers_figure

        return layers_figure(result, depth), result.warnings
    if view == "tree":
        from nvprof_kit.report.plots.tree import tree_figure

        return tree_figure(result, depth), result.warnings
    from nvprof_kit.analysis.attribution.steps import step_times
    from nvprof_kit.report.plots.steps import steps_figure

    if not result.summary.steps:
        raise UsageError(f"{trace.info.path}: no steps; put nvprof_kit.step(number) around each step of the loop")
    return steps_figure(result, step_times(trace, attribution)), result.warnings


def _timeline(trace: Trace, depth: int | None, step: int | None) -> Figure:
    from nvprof_kit.analysis.attribution.attribution import attribute
    from nvprof_kit.analysis.attribution.steps import require_step, step_times, typical_step
    from nvprof_kit.analysis.timeline import timeline
    from nvprof_kit.report.plots.timeline import timeline_figure

    attribution = attribute(trace)
    times = step_times(trace, attribution)
    if step is not None:
        require_step(times, step, trace.info.path)
    shown = timeline(trace, attribution, typical_step(times) if step is None else step)
    return timeline_figure(shown, trace.info.gpus, depth)
