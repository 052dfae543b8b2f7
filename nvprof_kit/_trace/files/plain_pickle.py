"""Pickles that PyTorch writes as files, read without running anything in them.

A pickle from somewhere else can run anything when it is loaded. So another process loads it
(`nvprof_kit._trace.torch_memory.load`), by an unpickler that knows no classes and no functions: numbers, text, lists,
tuples and dicts come through, all else is refused before it does anything. What the file asks for in memory and time is
asked of that process, whose limits are its own.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from nvprof_kit._trace.files.packed import check_file
from nvprof_kit.errors import CaptureError

LOADER = Path(__file__).parents[1] / "torch_memory" / "load.py"
"""The program that loads the file; it imports nothing but the standard library."""


class _Handed(pickle.Unpickler):
    """Loads what the loader handed over, which is plain data again."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")


def load_plain(path: Path, what: str) -> Any:
    """The plain data in a pickle.

    Args:
        path: The file.
        what: What it is to be, for messages: ``snapshot``.

    Raises:
        CaptureError: The file cannot be read, is no pickle, or holds anything but plain data.
    """
    return handed_over(path, what)["plain"]


def handed_over(path: Path, what: str, *arguments: str) -> dict[str, Any]:
    """What the loader makes of a file.

    Args:
        path: The file.
        what: What it is to be, for messages.
        arguments: Further arguments of the loader.

    Raises:
        CaptureError: As in `load_plain`.
    """
    check_file(path)
    try:
        path.open("rb").close()
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    # -I: nothing of the current folder or the environment is imported
    command = [sys.executable, "-I", str(LOADER.resolve()), str(path.resolve()), what, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            import pandas  # noqa: F401 - what is loaded becomes tables; importing takes its time beside the loading

            said: dict[str, Any] = _Handed(child.stdout).load()
        except (EOFError, pickle.UnpicklingError):
            said = {"error": f"refused as a {what}: loading it takes more time or memory than its size accounts for"}
        finally:
            child.kill()
    if "error" in said:
        raise CaptureError(f"{path}: {said['error']}")
    return said


def one_line(error: Exception) -> str:
    """The beginning of an error's message, as one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__
