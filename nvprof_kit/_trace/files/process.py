"""Settings of the process: memory and switches of threads, for processes of our own and never for a program that
imports the package; and what DuckDB does to the program around it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGEST_SHARED, _KEPT = 32 << 20, 256 << 20
_SWITCH_S = 0.0005


def keep_freed_memory() -> None:
    """Let this process keep some freed memory instead of returning it to the system at once.

    An answer is made of a hundred columns of a few megabytes, of which few live at the same time. With glibc's defaults
    each one's pages are requested and cleared anew, which takes a tenth of the time. Threads share one arena, because
    those of their own return every large block at once, or keep what they freed. Libraries that are not imported yet
    take the same memory: Arrow has no pool of its own, and NumPy asks for no huge pages, as to clear them takes longer
    than the faults that they save. The settings are of the whole process, so they are for processes of our own only.
    Does nothing where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_MMAP_THRESHOLD, _LARGEST_SHARED), (_TRIM_THRESHOLD, _KEPT), (_ARENA_MAX, 1)):
        mallopt(option, value)
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def return_freed_memory() -> None:
    """Return to the system what `keep_freed_memory` keeps, also between what is in use; does nothing without glibc."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def switch_threads_often() -> None:
    """Let a thread that comes back from NumPy or SQLite wait less for one that runs Python code.

    Such a thread asks for the interpreter hundreds of times in a map. With Python's default it waits up to 5 ms each
    time, and a processor is idle meanwhile. The setting is of the whole process, so it is for processes of our own
    only.
    """
    sys.setswitchinterval(_SWITCH_S)


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
