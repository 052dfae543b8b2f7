"""Lanes, fixtures for Nsight Systems and golden files, and the list of tests that are rerun."""

import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.golden import Golden
from support.lane import FAST, FULL, examples, fast_lane

# how long an example takes says more of the machine than of the code
settings.register_profile(
    "anywhere", deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anywhere")

# the tensors are tiny and two workers share the machine: more threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A suite that runs in the background of a script, or under nohup, is started with these ignored, and would start every
# program with them ignored. With a handler that does nothing the suite still survives them, and programs have them.
for _ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``nsys`` with the last executable in NVPROF_KIT_NSYS, or with the one on the PATH.

    One marked ``every_nsys`` sees what differs between releases and runs with each; in the full lane all do.
    """
    if "nsys" in metafunc.fixturenames:
        named = os.environ.get("NVPROF_KIT_NSYS", shutil.which("nsys") or "")
        executables = [path for path in named.split(os.pathsep) if path] or [None]
        if not (FULL or metafunc.definition.get_closest_marker("every_nsys")):
            executables = executables[-1:]
        metafunc.parametrize(
            "nsys", executables, indirect=True, ids=lambda path: path and Path(path).parent.parent.name
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this lane does not run; say which tests run in one worker, and which run again."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "chromium" in fixtures:
            item.add_marker("browser")
        if "nsys" in fixtures:
            item.add_marker("nsys")
        with_nsys = item.get_closest_marker("nsys")
        item.add_marker(pytest.mark.xdist_group("nsys" if with_nsys else item.nodeid.partition("::")[0]))
        if with_nsys:  # nsys loses its agent, or fails in its importer, in a few of some thousand runs
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=3))
    chosen = items if FULL else [item for item in items if not item.get_closest_marker("full")]
    if FAST:
        chosen = fast_lane(chosen)
    config.hook.pytest_deselected(items=[*{*items} - {*chosen}])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at what has been imported, which stays."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print tables as wide as into a file, wherever the tests are started and whatever an earlier one left."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _no_loop_of_an_earlier_test() -> None:
    """End the loop of an earlier test, whose model may live in a reference cycle until it is collected."""
    inferred = sys.modules.get("nvprof_kit._instrument.loop.inferred")
    loop = inferred.running() if inferred is not None else None
    if loop is not None:
        loop.end()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser; without one the test is skipped, or fails where NVPROF_KIT_REQUIRE_CHROMIUM=1."""
    from support.browser import browser

    with browser() as started:
        yield started


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
