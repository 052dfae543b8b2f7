"""Exceptions inside an integration become one warning; the run continues."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class Guarded:
    """Base class of objects that a framework calls: after the first exception inside, they do nothing.

    Attributes:
        broken: Whether an exception has occurred.
    """

    broken = False

    def give_up(self, error: Exception) -> None:
        """Warn once and remove what is installed."""
        if self.broken:
            return
        self.broken = True
        warn(f"{type(self).__name__} stops, the run continues without its ranges ({type(error).__name__}: {error})")
        try:
            self.undo()
        except Exception:  # the warning is out; the run must not fail
            return

    def undo(self) -> None:
        """Remove what is installed."""


def never_fails(method: F) -> F:
    """Decorate a method of a `Guarded`: it does not raise, and returns None if it fails."""

    @functools.wraps(method)
    def guarded(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    return cast(F, guarded)


def warn(text: str) -> None:
    """Emit a warning with the package's name."""
    warnings.warn(f"nvprof_kit: {text}", stacklevel=4)
