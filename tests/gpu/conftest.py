"""What the tests of a GPU share: each is marked ``gpu``, and is skipped, or fails, where there is none."""

import os
import sys
from pathlib import Path

import pytest
from support.cli import NVPROF_KIT
from support.gpu import GPU, PROGRAMS, Profiled, Program, gpus, need, run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, so that ``-m gpu`` finds it."""
    for item in items:
        if GPU in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture(scope="session", autouse=True)
def count() -> int:
    """The number of GPUs; without one the tests are skipped, or fail where NVPROF_KIT_REQUIRE_GPU=1."""
    found = gpus()
    if not found:
        absent = pytest.fail if os.environ.get("NVPROF_KIT_REQUIRE_GPU") == "1" else pytest.skip
        absent("needs an NVIDIA GPU")
    return found


@pytest.fixture
def two_gpus(count: int) -> None:
    """Skips a test of several ranks where there is one GPU."""
    if count < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture
def program() -> Program:
    """Runs a program of `tests/gpu/programs`: ``program("flops.py", folder)``."""
    return lambda name, *arguments: run(sys.executable, PROGRAMS / name, *arguments)


@pytest.fixture
def profiled(tmp_path: Path) -> Profiled:
    """Runs such a program under `nvprof-kit profile`, in its window; returns the capture."""
    need("nsys")

    def profile(name: str, *arguments: object) -> Path:
        verb = [*NVPROF_KIT, "profile", "-o", tmp_path / "run", "-x", "--capture-range=cudaProfilerApi", "--"]
        run(*verb, sys.executable, PROGRAMS / name, *arguments)
        return tmp_path / "run.sqlite"

    return profile
