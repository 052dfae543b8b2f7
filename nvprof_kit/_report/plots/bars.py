"""Bar charts of tables without a plot of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvprof_kit._report.plots.plots import PALETTE
from nvprof_kit._report.text.shorten import fit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
    from matplotlib.figure import Figure

    lengths = frame[list(values)].apply(lambda column: column.astype(float)).fillna(0.0)
    drawn = lengths.abs().sum(axis=1)
    longest_rows = drawn[drawn > 0].nlargest(MAX_BARS).index
    bars = lengths.loc[lengths.index.isin(longest_rows)]
    unit, factor = next((unit_factor for ending, unit_factor in UNITS.items() if values[0].endswith(ending)), ("", 1.0))
    figure = Figure(figsize=(10, 1.4 + 0.28 * max(len(bars), 1)), layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for column, colour in zip(values, PALETTE, strict=False):
        axes.barh(range(len(bars)), bars[column] * factor, left=left, color=colour, label=_words(column))
        left = left + bars[column].to_numpy() * factor
    axes.set_yticks(range(len(bars)), _labels(frame.loc[bars.index, list(labels)]))
    axes.invert_yaxis()
    axes.set_xlabel(f"{_words(values[0])}, {unit}" if len(values) == 1 else unit)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(values) > 1:
        axes.legend(frameon=False, ncols=len(values), loc="lower right", bbox_to_anchor=(1, 1))
    left_out = int((drawn > 0).sum()) - len(bars)
    figure.suptitle(f"{title} (and {left_out} smaller)" if left_out else title)
    return figure


def _words(column: str) -> str:
    return column.removesuffix("_ns").removesuffix("_pct").replace("_", " ")


def _labels(named: pd.DataFrame) -> list[str]:
    """Labels of rows: numbers with the column name; columns with a single value are left out."""
    varying = [column for column in named if named[column].nunique(dropna=False) > 1] or list(named)[:1]
    texts = []
    for row in named[varying].itertuples(index=False):
        parts = [(column, value) for column, value in zip(varying, row, strict=True) if not _missing(value)]
        text = " ".join(value if isinstance(value, str) else f"{column} {value}" for column, value in parts)
        texts.append(text or "(none)")
    return fit(texts, _LONGEST)


def _missing(value: object) -> bool:
    return str(value) in ("", "None", "nan", "<NA>")
