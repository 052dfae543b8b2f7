"""The result of `Capture.plot`."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._result.result import Result, renderers
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

LARGEST_SVG = 100_000
"""Above this many bytes of SVG, a notebook gets a PNG instead."""


@dataclass(frozen=True, repr=False, eq=False)
class Plot(Result):
    """A plot. A notebook displays it; `save` writes it as .png, .svg or .pdf.

    Attributes:
        view: The plotted view.
        drawn: The Matplotlib figure.
        rows: The plotted data.
        warnings: What may be missing or distorted.
    """

    view: str
    drawn: Figure
    rows: pd.DataFrame
    warnings: tuple[Issue, ...] = ()

    def table(self, view: str | None = None) -> pd.DataFrame:
        """The plotted data."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """A line that says how to save the plot, which a terminal cannot show."""
        return [f"a plot of {self.view}; save it as .png, .svg or .pdf"]

    def figure(self) -> Figure:
        """The Matplotlib figure."""
        return self.drawn

    def _repr_html_(self) -> str:
        kind, picture = "svg+xml", renderers().encode_figure(self.drawn, "svg")
        if len(picture) > LARGEST_SVG:
            kind, picture = "png", renderers().encode_figure(self.drawn, "png")
        coded = base64.b64encode(picture).decode()
        return f'<img alt="{self.view}" style="max-width:100%" src="data:image/{kind};base64,{coded}">'
