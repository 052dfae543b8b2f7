"""How each answer is shown to people, by its type."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.plots.plots import encode as encode_figure
from nvprof_kit._report.text.table import html_of, text_of
from nvprof_kit._result.result import Result, no_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

__all__ = ["encode_figure", "figure", "html_of", "page", "parts", "shown", "text_of"]

RENDERERS: Mapping[str, Mapping[str, str]] = {
    "Diff": {"parts": "text.diff:diff_report", "markdown": "text.diff:diff_markdown"},
    "Flops": {"parts": "text.by_layer:flops_report"},
    "Advice": {"parts": "text.advise:advise_report"},
    "Breakdown": {"parts": "text.views:breakdown_report"},
    "Checks": {"parts": "text.advise:findings_report"},
    "Layers": {"parts": "text.layers:layers_report", "figure": "plots.layers:figure"},
    "Memory": {
        "parts": "text.memory:memory_report",
        "figure": "plots.memory:memory_figure",
        "page": "text.memory:memory_page",
    },
    "Metrics": {"parts": "text.by_layer:metrics_report"},
    "NcuKernels": {"parts": "text.ncu:kernels_report"},
    "NcuLayers": {"parts": "text.by_layer:ncu_layers_report", "figure": "plots.roofline:roofline_figure"},
    "NcuPlan": {"parts": "text.ncu:plan_report", "script": "text.ncu:plan_script"},
    "RankTable": {"parts": "text.ranks:rank_table", "figure": "plots.ranks:waits_figure"},
    "Ranks": {"parts": "text.ranks:ranks_report", "figure": "plots.ranks:waits_figure"},
    "Summary": {"parts": "text.views:summary_report"},
    "Timers": {"parts": "text.timers:timers_report", "figure": "text.timers:timeline_figure"},
}
"""The functions that show a type, by its name: ``parts`` for the terminal, and perhaps others; each is named as module
and function below `nvprof_kit._report`, and imported when it is needed.
"""


def parts(result: Result) -> list[RenderableType]:
    """What is printed."""
    printed: list[RenderableType] = _renderer(result, "parts")(result)
    return printed


def figure(result: Result) -> Figure:
    """The plot of an answer: its own, or bars of a column.

    Raises:
        UsageError: It has no plot.
    """
    if draw := _renderer(result, "figure"):
        drawn: Figure = draw(result)
        return drawn
    values, labels = result.bars.get(result.schema, ((), ()))
    frame = result.to_frame() if values else None
    if frame is None or not {*values, *labels} <= set(frame):
        raise no_plot(type(result).__name__, [name.partition("-")[2] for name in result.bars if "-" in name])
    from nvprof_kit._report.plots.plots import bars_figure

    return bars_figure(frame, values, labels, type(result).__name__)


def page(result: Result) -> bytes:
    """An answer as a self-contained HTML page: its own, or what is printed."""
    if make := _renderer(result, "page"):
        html: bytes = make(result)
        return html
    from nvprof_kit._report.page.template import result_page

    return result_page(type(result).__name__, html_of(result.parts()))


def shown(result: Result, way: str, *words: Any) -> Any:
    """An answer in a way of its own: a comparison as ``markdown`` for a pull request, a plan as ``script`` for ncu."""
    return _renderer(result, way)(result, *words)


def _renderer(result: Result, way: str) -> Any:
    """The function that shows an answer in one way; None if its type has none of its own."""
    name = RENDERERS.get(type(result).__name__, {}).get(way)
    if name is None:
        return None
    module, _, function = name.partition(":")
    return getattr(import_module(f"nvprof_kit._report.{module}"), function)
