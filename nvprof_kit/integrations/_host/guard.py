"""What goes wrong inside an integration ends as one warning: the host's run goes on."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class Guarded:
    """Base of what a host calls: after the first exception inside it does nothing any more.

    Attributes:
        broken: Whether it has given up.
    """

    broken = False

    def give_up(self, error: Exception) -> None:
        """Warn, once, and undo what can be undone."""
        if self.broken:
            return
        self.broken = True
        warn(f"{type(self).__name__} gives up, the run goes on without its ranges ({type(error).__name__}: {error})")
        try:
            self.undo()
        except Exception:  # the warning is out, and the host must not suffer
            return

    def undo(self) -> None:
        """Take back whatever is installed."""


def never_fails(method: F) -> F:
    """Decorate a method of a `Guarded`: it raises nothing, and returns None where it cannot do its work."""

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
    """Warn in the name of the package, from wherever the host called."""
    warnings.warn(f"nvprof_kit: {text}", stacklevel=4)
