"""Run code once a module is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from nvprof_kit._instrument.loop.guard import warn
from nvprof_kit._instrument.torch_compat import AfterImport


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
