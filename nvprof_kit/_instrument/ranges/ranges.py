"""Ranges and layer calls: the C extension if it could be built, else Python.

``NVPROF_KIT_PURE_PYTHON=1`` selects Python. Both behave the same (documented in `ranges_python`); the tests run with
both.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from nvprof_kit._instrument.ranges import ranges_python


def _choose() -> Any:
    if os.environ.get("NVPROF_KIT_PURE_PYTHON", "0") not in ("", "0"):
        return ranges_python
    try:
        built = importlib.import_module("._ranges", __package__)
    except ImportError:
        return ranges_python
    return built if getattr(built, "INTERFACE", None) == ranges_python.INTERFACE else ranges_python


if TYPE_CHECKING:
    from nvprof_kit._instrument.ranges.frames_python import OUTSIDE, Frame
    from nvprof_kit._instrument.ranges.ranges_python import Block, Position, Range, ask, follow, ranged, switch
else:
    _chosen = _choose()
    OUTSIDE, Block, Frame, Position, Range = (
        _chosen.OUTSIDE,
        _chosen.Block,
        _chosen.Frame,
        _chosen.Position,
        _chosen.Range,
    )
    ask, follow, ranged, switch = _chosen.ask, _chosen.follow, _chosen.ranged, _chosen.switch

compiled: bool = Range is not ranges_python.Range
"""Whether the C extension is in use."""

__all__ = ["OUTSIDE", "Block", "Frame", "Position", "Range", "ask", "compiled", "follow", "ranged", "switch"]
