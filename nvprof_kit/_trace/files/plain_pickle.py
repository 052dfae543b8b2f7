"""Safe reading of pickle files written by PyTorch.

An untrusted pickle can run arbitrary code when loaded. A child process therefore loads it
(`nvprof_kit._trace.torch_memory.load`), with an unpickler that rejects all classes and functions: only numbers, text,
lists, tuples and dicts load. The child process has its own memory and time limits.
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
"""The script that loads the file; it imports only the standard library."""


class _Handed(pickle.Unpickler):
    """Loads the output of the child process, which is plain data too."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")


def load_plain(path: Path, noun: str) -> Any:
    """The plain data in a pickle.

    Args:
        path: The file.
        noun: The expected content, for messages: ``snapshot``.

    Raises:
        CaptureError: The file cannot be read, is not a pickle, or contains more than plain data.
    """
    return handed_over(path, noun)["plain"]


def handed_over(path: Path, noun: str, *arguments: str) -> dict[str, Any]:
    """Run the loader on a file and return its output.

    Args:
        path: The file.
        noun: The expected content, for messages.
        arguments: Further arguments of the loader.

    Raises:
        CaptureError: As in `load_plain`.
    """
    check_file(path)
    try:
        path.open("rb").close()
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    # -I: import nothing from the current folder or the environment
    command = [sys.executable, "-I", str(LOADER.resolve()), str(path.resolve()), noun, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            import pandas  # noqa: F401 - needed for the tables later; the import overlaps with the child process

            answer: dict[str, Any] = _Handed(child.stdout).load()
        except (EOFError, pickle.UnpicklingError):
            answer = {"error": f"refused as a {noun}: loading it takes more time or memory than its size accounts for"}
        finally:
            child.kill()
    if "error" in answer:
        raise CaptureError(f"{path}: {answer['error']}")
    return answer


def one_line(error: Exception) -> str:
    """The beginning of an error message, on one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__
