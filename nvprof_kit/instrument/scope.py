"""A stretch of a program with a name: a context manager that also decorates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import state
from .backends import Backend, Range
from .wrapping import wrap

F = TypeVar("F", bound=Callable[..., Any])


class Scope:
    """A range around a ``with`` block or around each call of a function; reusable, and nestable in itself."""

    __slots__ = ("_range",)

    def __init__(self, range_: Range) -> None:
        self._range = range_

    def __enter__(self) -> Scope:
        backend = state.backend
        if backend is not None:
            range_ = self._range
            if range_.backend is not backend:
                backend.prepare(range_)
            range_.push()
            backend.thread.here.owners.append(self)
        return self

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        backend = state.backend
        if backend is not None:
            owners = backend.thread.here.owners
            if owners and owners[-1] is self:  # `Backend.close`, of which this is the usual case
                owners.pop()
                backend.pop()
            else:
                backend.close(self)

    def __call__(self, function: F) -> F:
        """Decorate a function: each call (each resume of a coroutine or generator) is a range."""
        return wrap(function, lambda *_args, **_kwargs: self)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside the range."""
        with self:
            return function(*args, **kwargs)


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
