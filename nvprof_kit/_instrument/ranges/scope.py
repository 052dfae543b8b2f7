"""A stretch of a program with a name: a context manager that also decorates."""

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
"""So many names keep what was made for them."""


class Scope(Block):
    """A range around a ``with`` block or around each call of a function; reusable, and nestable in itself."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.range,)

    def __call__(self, function: F) -> F:
        """Decorate a function: each call (each resume of a coroutine or generator) is a range."""
        return wrap(function, Always(self))

    @uncompiled_itself
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside the range."""
        with self:
            return function(*args, **kwargs)


def keep(scopes: dict[str, S], name: str, scope: S) -> S:
    """Keep the scope of a name, so that the next question for it is one look into a dictionary."""
    if len(scopes) >= MOST_KEPT:  # the program makes up names without end
        scopes.clear()
    scopes[name] = scope
    return scope


class Started:
    """A range that was started and can be ended from any thread, once."""

    __slots__ = ("_backend", "_range")

    def __init__(self, range_: Range) -> None:
        self._backend: Backend | None = state.backend
        self._range = None if self._backend is None else self._backend.start(range_)

    def end(self) -> None:
        """End the range; a second call does nothing."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.end(self._range)
