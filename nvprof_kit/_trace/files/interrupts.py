"""Ctrl-C during a query of DuckDB, which reports it as an error of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn DuckDB's error for an interrupted query back into what interrupted it.

    Raises:
        KeyboardInterrupt: The query was interrupted.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError and "interrupted" in str(error):
            raise KeyboardInterrupt from None
        raise
