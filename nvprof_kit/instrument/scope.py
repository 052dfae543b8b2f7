"""A stretch of a program with a name: a context manager that also decorates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import state
from .backends import Backend, Range
from .wrapping import Always, wrap

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="Scope")

MOST_KEPT = 4096
"""So many names keep what was made for them."""


class Scope:
    """A range around a ``with`` block or around each call of a function; reusable, and nestable in itself.

    Attributes:
        range: The range.
        recompute: What takes its place inside a running backward pass; mostly the same.
        followed: The layer, where the backward pass of what a call returns is followed.
        owner: Who owns the ranges of calls.
    """

    __slots__ = ("followed", "owner", "range", "recompute")

    def __init__(self, range_: Range, recompute: Range | None = None) -> None:
        self.range = range_
        self.recompute = recompute or range_
        self.followed: Any = None
        self.owner: object = self

    def __enter__(self) -> Scope:
        backend = state.backend
        if backend is not None:
            range_ = self.range
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
        return wrap(function, Always(self))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function inside the range."""
        with self:
            return function(*args, **kwargs)

    def leave(self, _outputs: Any) -> None:
        """End a call that was begun elsewhere, in the general way."""
        if state.backend is not None:
            state.backend.close(self.owner)


class Kept(dict[str, S]):
    """The scopes of names, each made once; a dict, because none of our functions runs for a name that it knows."""

    def __init__(self, make: Callable[[str], S]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> S:
        if len(self) >= MOST_KEPT:  # the program makes up names without end
            self.clear()
        scope = self[name] = self._make(name)
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
