"""How each answer is shown to people, by its type."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.plots.plots import encode as encode_figure
from nvprof_kit._report.text.table import html_of, text_of
from nvprof_kit._result.result import Result, no_plot
from nvprof_kit._toml import read_toml

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

__all__ = ["encode_figure", "figure", "html_of", "page", "parts", "shown", "text_of"]


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
    name = read_toml("nvprof_kit._report", "renderers.toml").get(type(result).__name__, {}).get(way)
    if name is None:
        return None
    module, _, function = name.partition(":")
    return getattr(import_module(f"nvprof_kit._report.{module}"), function)
