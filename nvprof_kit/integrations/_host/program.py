"""What an integration has to know of the program: its calling objects, and when it imports a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from nvprof_kit._instrument.loop.guard import warn
from nvprof_kit._instrument.torch_compat import AfterImport

_FRAMES = 8


def calling_object(attribute: str) -> Any:
    """The nearest ``self`` among the callers with this attribute; None if none of the last eight frames has one."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if candidate is not None and hasattr(candidate, attribute):
            return candidate
        frame = frame.f_back
    return None


def after_import(name: str, then: Callable[[Any], object]) -> None:
    """Call a function with a module: now if it is imported, else once when it is. Exceptions become a warning."""
    module = sys.modules.get(name)
    if module is not None:
        _call(then, module)
    else:
        sys.meta_path.insert(0, AfterImport(name, partial(_call, then)))


def _call(then: Callable[[Any], object], module: Any) -> None:
    try:
        then(module)
    except Exception as error:  # the program's import must not fail
        warn(f"{module.__name__} is not ranged ({type(error).__name__}: {error})")
