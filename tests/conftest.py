"""Fixtures of every test: the Nsight Systems at hand."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def _nsys_executables() -> list[str]:
    named = os.environ.get("NVPROF_KIT_NSYS")
    if named is not None:
        return [path for path in named.split(os.pathsep) if path]
    found = shutil.which("nsys")
    return [found] if found else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``nsys`` with each executable in NVPROF_KIT_NSYS, or with the one on the PATH."""
    if "nsys" in metafunc.fixturenames:
        executables = _nsys_executables() or [None]
        metafunc.parametrize(
            "nsys", executables, indirect=True, ids=lambda path: path and Path(path).parent.parent.name
        )


@pytest.fixture
def nsys(request: pytest.FixtureRequest) -> str:
    """Path of an nsys executable; without one the test is skipped, or fails where NVPROF_KIT_REQUIRE_NSYS=1."""
    if request.param is None:
        absent = pytest.fail if os.environ.get("NVPROF_KIT_REQUIRE_NSYS") == "1" else pytest.skip
        absent("no nsys: set NVPROF_KIT_NSYS to the executables, separated by os.pathsep")
    return request.param
