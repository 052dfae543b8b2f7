"""What all plots share: the colorblind-safe palette of Okabe and Ito, the canvas, the encoding; and bars of a table."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nvprof_kit._report.text.texts import fit, is_missing
from nvprof_kit._result.formats import plain

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASE_COLOURS: Mapping[str, str] = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "recompute": "#009E73",
    "other": "#8C8C8C",
}
"""Color of each phase."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C", "#444444")
"""Colors of other series, in order."""


def canvas(
    size: tuple[float, float], title: str, x: str = "", y: str = "", grid: Literal["x", "y", "both"] | None = None
) -> tuple[Figure, Axes]:
    """A figure with one plot, without lines at the top and on the right.

    Args:
        size: Width and height in inches.
        title: Title of the figure.
        x: Title of the x axis.
        y: Title of the y axis.
        grid: The axis whose ticks have lines behind the data.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, color="#DDDDDD")
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=15)
    axes.set_xlabel(x, fontsize=13)
    axes.set_ylabel(y, fontsize=13)
    return figure, axes


def legend_above(axes: Axes, columns: int = 4, **options: Any) -> None:
    """The legend above the plot."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False, fontsize=12, **options)


def encode(figure: Figure, plot_format: str) -> bytes:
    """Encode a figure in ``png``, ``svg`` or ``pdf``. Texts from a capture are shown as they are: ``$`` begins no
    formula, and control characters, which XML forbids, are replaced.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    numbers: set[Text] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FuncFormatter):  # labels by name
            axis.set_major_formatter(
                FuncFormatter(lambda value, position, write=formatter: plain(write(value, position)))
            )
        else:  # powers of ten are formulas
            numbers |= {axis.get_offset_text(), *axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in numbers:
            text.set_text(plain(text.get_text()))
            text.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # it would print the character
        figure.savefig(buffer, format=plot_format, dpi=150)
    return buffer.getvalue()


MAX_BARS = 30
"""Maximum number of bars; the largest are kept in table order."""

_LONGEST = 60
"""Maximum number of characters of a label."""

UNITS = {"_ns": ("ms", 1e-6), "_pct": ("%", 1.0), "mfu": ("%", 100.0)}
"""Unit and scale factor by column suffix."""


def bars_figure(frame: pd.DataFrame, values: Sequence[str], labels: Sequence[str], title: str) -> Figure:
    """A bar for each row.

    Args:
        frame: The table.
        values: Columns with the bar lengths, all in one unit; several are stacked.
        labels: Columns that name a row; empty texts are left out.
        title: Title of the figure.
    """
    lengths = frame[list(values)].apply(lambda column: column.astype(float)).fillna(0.0)
    drawn = lengths.abs().sum(axis=1)
    longest_rows = drawn[drawn > 0].nlargest(MAX_BARS).index
    bars = lengths.loc[lengths.index.isin(longest_rows)]
    unit, factor = next((unit_factor for ending, unit_factor in UNITS.items() if values[0].endswith(ending)), ("", 1.0))
    left_out = int((drawn > 0).sum()) - len(bars)
    title = f"{title} (and {left_out} smaller)" if left_out else title
    about = f"{_words(values[0])}, {unit}" if len(values) == 1 else unit
    figure, axes = canvas((10, 1.4 + 0.28 * max(len(bars), 1)), title, about)
    left = 0.0
    for column, colour in zip(values, PALETTE, strict=False):
        axes.barh(range(len(bars)), bars[column] * factor, left=left, color=colour, label=_words(column))
        left = left + bars[column].to_numpy() * factor
    axes.set_yticks(range(len(bars)), _labels(frame.loc[bars.index, list(labels)]))
    axes.invert_yaxis()
    if len(values) > 1:
        legend_above(axes, len(values))
    return figure


def _words(column: str) -> str:
    return column.removesuffix("_ns").removesuffix("_pct").replace("_", " ")


def _labels(named: pd.DataFrame) -> list[str]:
    """Labels of rows: numbers with the column name; columns with a single value are left out."""
    varying = [column for column in named if named[column].nunique(dropna=False) > 1] or list(named)[:1]
    texts = []
    for row in named[varying].itertuples(index=False):
        parts = [pair for pair in zip(varying, row, strict=True) if str(pair[1]) and not is_missing(pair[1])]
        text = " ".join(value if isinstance(value, str) else f"{column} {value}" for column, value in parts)
        texts.append(text or "(none)")
    return fit(texts, _LONGEST)
