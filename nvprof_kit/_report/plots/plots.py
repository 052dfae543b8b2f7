"""Common settings of plots: no display needed, and the colorblind-safe palette of Okabe and Ito."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from nvprof_kit._result.formats import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

PHASE_COLOURS: Mapping[str, str] = MappingProxyType(
    {"forward": "#0072B2", "backward": "#E69F00", "recompute": "#009E73", "other": "#8C8C8C"}
)
"""Color of each phase."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C", "#444444")
"""Colors of other series, in order."""


def encode(figure: Figure, plot_format: str) -> bytes:
    """Encode a figure in ``png``, ``svg`` or ``pdf``. Texts from a capture are shown as they are: ``$`` begins no
    formula, and control characters, which XML forbids, are replaced.
    """
    _show_texts_as_they_are(figure)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # it would print the character
        figure.savefig(buffer, format=plot_format, dpi=150)
    return buffer.getvalue()


def _show_texts_as_they_are(figure: Figure) -> None:
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    numbers: set[Text] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FuncFormatter):  # labels by name
            axis.set_major_formatter(FuncFormatter(partial(_plain_label, formatter)))
        else:  # powers of ten are formulas
            numbers |= {axis.get_offset_text(), *axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in numbers:
            text.set_text(plain(text.get_text()))
            text.set_parse_math(False)


def _plain_label(formatter: FuncFormatter, value: float, position: int | None = None) -> str:
    return plain(str(formatter(value, position)))
