"""What DuckDB does to the program around it: it draws a progress bar, and reports Ctrl-C as an error of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


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


def without_progress_bar(database: Any) -> None:
    """Keep DuckDB from drawing a progress bar on stdout, among the answer."""
    import duckdb

    # in a notebook without ipywidgets DuckDB can neither draw it nor be told not to
    with suppress(duckdb.InvalidInputException):
        database.execute("SET enable_progress_bar = false")
