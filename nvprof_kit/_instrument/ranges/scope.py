"""A named range as a context manager and decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nvprof_kit._instrument.compile.uncompiled import uncompiled_itself
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.backends import Backend
from nvprof_kit._instrument.ranges.ranges import Block, Range
from nvprof_kit._instrument.ranges.wrapping import Always, wrap

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=Block)

MOST_KEPT = 4096
"""Maximum number of names in a cache."""


class Scope(Block):
    """A range around a ``with`` block or around each call of a function; reusable and reentrant."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.range,)

    def __call__(self, function: F) -> F:
        """Decorate a function; each call (each resume of a coroutine or generator) is a range."""
        return wrap(function, Always(self))

    @uncompiled_itself
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside the range."""
        with self:
            return function(*args, **kwargs)


def keep(scopes: dict[str, S], name: str, scope: S) -> S:
    """Cache the scope of a name; returns the scope."""
    if len(scopes) >= MOST_KEPT:  # the program may create names without limit
        scopes.clear()
    scopes[name] = scope
    return scope


class Started:
    """A started range that any thread can end, once."""

    __slots__ = ("_backend", "_range")

    def __init__(self, range_: Range) -> None:
        self._backend: Backend | None = state.backend
        self._range = None if self._backend is None else self._backend.start(range_)

    def end(self) -> None:
        """End the range; a second call does nothing."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.end(self._range)
