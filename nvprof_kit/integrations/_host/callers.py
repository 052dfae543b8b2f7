"""Find the calling object of the framework, for frameworks that build a profiler without passing the model."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_FRAMES = 8


def calling_object(attribute: str) -> Any:
    """The nearest ``self`` among the callers with this attribute; None if none of the last eight frames has one."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        found = frame.f_locals.get("self")
        if found is not None and hasattr(found, attribute):
            return found
        frame = frame.f_back
    return None
