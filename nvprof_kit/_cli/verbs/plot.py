"""``nvprof-kit plot``: plots of a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import rules_option, steps_options
from nvprof_kit._cli.output import Reading, reading_into
from nvprof_kit._cli.progress import progress
from nvprof_kit._result import formats
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._api.capture import PlotView

VIEWS = ("layers", "timeline")


@click.command(short_help="Plot layers or the timeline of a step, as png, svg or pdf.")
@reading_into({f".{name}": name for name in formats.PICTURES})
@click.option("--view", type=click.Choice(VIEWS), default="layers", show_default=True, help="What to draw.")
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model; default: as many as fit.")
@click.option("--step", type=int, help="Step of the timeline; default: the step of median length.")
@steps_options
@rules_option
def plot(
    request: Reading, *, view: PlotView, depth: int | None, step: int | None, steps: StepOptions, rules: str | None
) -> None:
    """Plot a capture, in colors that readers with color blindness can tell apart.

    layers: a bar per layer, by phase. timeline: one step over time, layers above the GPU's streams, with idle gaps.
    FILE ends in .png, .svg or .pdf.
    """
    if len(request.captures) > 1:
        raise UsageError(f"a plot shows one capture, not {len(request.captures)}; plot them one by one")
    if step is not None and view != "timeline":
        raise UsageError("--step is for --view timeline; layers shows every step")
    (capture,) = request.captures
    with progress() as report:
        report(f"reading and drawing {capture}")
        result = request.open(capture, rules).plot(view, depth=depth, step=step, steps=steps)
        request.output.write_results([result])
