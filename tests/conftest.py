"""Fixtures of every test: the Nsight Systems at hand."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.golden import Golden

settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")  # how long an example takes says more of the machine than of the code


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a failed test again, and say so, where others fail now and then: nsys fails to start under load, and
    processes of PyTorch's gloo abort at their end ("terminate called without an active exception").
    """
    for item in items:
        named = "nsys" in getattr(item, "fixturenames", ()) or item.get_closest_marker("nsys")
        if named or item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=3))


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Golden:
    """Compares a text with a file in `tests/golden`: ``golden("layers/eager-2023.4.csv", found)``."""
    return Golden(update=pytestconfig.getoption("--update-golden"))


@pytest.fixture
def nsys(request: pytest.FixtureRequest) -> Iterator[str]:
    """Path of an nsys executable; without one the test is skipped, or fails where NVPROF_KIT_REQUIRE_NSYS=1.

    One such test at a time runs on a machine: different releases of nsys that run at once lose each other's events.
    """
    if request.param is None:
        absent = pytest.fail if os.environ.get("NVPROF_KIT_REQUIRE_NSYS") == "1" else pytest.skip
        absent("no nsys: set NVPROF_KIT_NSYS to the executables, separated by os.pathsep")
    with (Path(tempfile.gettempdir()) / "nvprof-kit-nsys.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield request.param
