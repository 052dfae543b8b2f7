"""A picture of a capture, as an answer."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._report.plots import plots
from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Plot(Result):
    """A picture; a notebook shows it, `save` writes it as .png, .svg or .pdf.

    Attributes:
        view: What is drawn.
        drawn: The figure of matplotlib.
        rows: The figures behind it.
        warnings: Sentences on what may be missing or distorted.
    """

    view: str
    drawn: Figure
    rows: pd.DataFrame
    warnings: tuple[str, ...] = ()

    has_plot: ClassVar[bool] = True

    def to_frame(self) -> pd.DataFrame:
        """The figures behind the picture."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """That it is a picture: a terminal cannot show it."""
        return [f"a plot of {self.view}; save it as .png, .svg or .pdf"]

    def figure(self) -> Figure:
        """The figure of matplotlib."""
        return self.drawn

    def _repr_html_(self) -> str:
        picture = base64.b64encode(plots.encode(self.drawn, "svg")).decode()
        return f'<img alt="{self.view}" style="max-width:100%" src="data:image/svg+xml;base64,{picture}">'
