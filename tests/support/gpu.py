"""Runs the programs and scripts of `tests/gpu`."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cli import execute

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests" / "gpu"
PROGRAMS = GPU / "programs"
Program = Callable[..., str]
"""Runs a program by its name with some arguments; returns what it printed."""
Profiled = Callable[..., Path]
"""The same under nsys; returns the capture."""


def gpus() -> int:
    """Number of GPUs that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = execute("nvidia-smi", "--list-gpus")
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def need(*tools: str) -> None:
    """Skip the test if a tool is not on PATH."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} on PATH")


def run(*command: object, timeout: float = 600, **more: str) -> str:
    """Run a command in the repository's root; returns what it printed, which a failure shows."""
    done = execute(*command, cwd=ROOT, timeout=timeout, check=True, PYTHON=sys.executable, **more)
    return done.stdout + done.stderr
