"""Pickles that PyTorch writes as files, read without running anything in them.

A pickle from somewhere else can run anything when it is loaded. So it is loaded by an unpickler that knows no classes
and no functions: numbers, text, lists, tuples and dicts come through, all else is refused before it does anything.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvprof_kit.errors import CaptureError

_ROOM = 2 << 30
_ROOM_PER_BYTE = 40
"""Memory that loading may take, apart and per byte of the file: a made-up file asks for more than any real one."""


class _PlainUnpickler(pickle.Unpickler):
    """Loads plain data and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def load_plain(path: Path, what: str) -> Any:
    """The plain data in a pickle.

    Args:
        path: The file.
        what: What it is to be, for messages: ``snapshot``.

    Raises:
        CaptureError: The file cannot be read, is no pickle, or holds anything but plain data.
    """
    try:
        with path.open("rb") as file, _bounded_memory(path.stat().st_size):
            return _PlainUnpickler(file).load()
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except pickle.UnpicklingError as error:
        more = "it holds more than plain data, " if "it would" in str(error) or "it refers" in str(error) else ""
        raise CaptureError(f"{path}: refused as a {what}: {more}{one_line(error)}; nothing in it was run") from None
    except MemoryError:
        raise CaptureError(
            f"{path}: refused as a {what}: it asks for far more memory than its size accounts for"
        ) from None
    except Exception as error:  # whatever a damaged or made-up pickle leads to
        raise CaptureError(
            f"{path}: not a pickle, or a damaged one ({one_line(error)}); take the {what} again"
        ) from None


def one_line(error: Exception) -> str:
    """The beginning of an error's message, as one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__


@contextmanager
def _bounded_memory(file_bytes: int) -> Iterator[None]:
    """Let the process grow by what such a file can need, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ROOM + _ROOM_PER_BYTE * file_bytes
    if before[0] != resource.RLIM_INFINITY:
        limit = min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
