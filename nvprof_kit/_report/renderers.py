"""How each answer is shown to people, by its type."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.plots.plots import encode as encode_figure
from nvprof_kit._report.text.table.terminal import html_of, text_of
from nvprof_kit._result.result import Result, no_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

__all__ = ["RENDERERS", "encode_figure", "figure", "html_of", "page", "parts", "text_of"]

RENDERERS: Mapping[str, Mapping[str, str]] = {
    "Timers": {"parts": "text.timers:timers_report", "figure": "text.timers:timeline_figure"},
}
"""The functions that show a type, by its name: ``parts`` for the terminal, and perhaps ``figure`` and ``page``; each is
named as module and function below `nvprof_kit._report`, and imported when it is needed.
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
        raise no_plot(type(result).__name__)
    from nvprof_kit._report.plots.bars import bars_figure

    return bars_figure(frame, values, labels, type(result).__name__)


def page(result: Result) -> bytes:
    """An answer as a self-contained HTML page: its own, or what is printed."""
    if make := _renderer(result, "page"):
        made: bytes = make(result)
        return made
    from nvprof_kit._report.page.plain import result_page

    return result_page(type(result).__name__, html_of(result.parts()))


def _renderer(result: Result, way: str) -> Any:
    """The function that shows an answer in one way; None if its type has none of its own."""
    name = RENDERERS.get(type(result).__name__, {}).get(way)
    if name is None:
        return None
    module, _, function = name.partition(":")
    return getattr(import_module(f"nvprof_kit._report.{module}"), function)
