"""Common settings of plots: no display needed, and the colorblind-safe palette of Okabe and Ito."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
"""The plot formats by file suffix."""

PHASE_COLOURS: Mapping[str, str] = MappingProxyType(
    {"forward": "#0072B2", "backward": "#E69F00", "recompute": "#009E73", "other": "#8C8C8C"}
)
"""Color of each phase."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C", "#444444")
"""Colors of other series, in order."""


def encode(figure: Figure, plot_format: str) -> bytes:
    """Encode a figure in one of `FORMATS`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=plot_format, dpi=150)
    return buffer.getvalue()
