"""A scheduled loop under the embedded recorder, under a tool, and with nobody listening."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import nvprof_kit._instrument.session as session
from nvprof_kit import Schedule, UsageError, record, step
from nvprof_kit._capture.recorder.record import Tool, running
from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.ranges.backends import Backend, Range

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nobody_listens_before_and_after() -> None:
    assert session.backend is None
    yield
    assert session.backend is None and running() is None


def steps_in(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return [name.rpartition(":")[2] for name in names if name.startswith("nvprof_kit:step:")]


def loop(profiling: record, steps: int) -> None:
    with profiling:
        for number in range(steps):
            with step(number):
                torch.ones(4, 4) @ torch.ones(4, 4)
            profiling.step()


def test_one_window(tmp_path: Path) -> None:
    loop(record(tmp_path / "run.json.gz", schedule=(2, 4)), 6)
    assert steps_in(tmp_path / "run.json.gz") == ["step 2", "step 3"]


def test_several_windows_and_their_handler(tmp_path: Path) -> None:
    ready: list[tuple[str, Window]] = []
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=2)
    handler = lambda path, window: ready.append((path.name, window))  # noqa: E731
    loop(record(tmp_path / "run.json.gz", schedule=schedule, on_trace_ready=handler), 9)
    assert ready == [("run.1.json.gz", Window(0, 2, 3)), ("run.2.json.gz", Window(1, 6, 7))]
    assert steps_in(tmp_path / "run.2.json.gz") == ["step 6", "step 7"]


def test_a_loop_that_ends_early(tmp_path: Path) -> None:
    loop(record(tmp_path / "cut.json.gz", schedule="0:100"), 2)
    assert steps_in(tmp_path / "cut.json.gz") == ["step 0", "step 1"]
    loop(record(tmp_path / "warm.json.gz", schedule=Schedule(warmup=5)), 2)
    assert not (tmp_path / "warm.json.gz").exists()


def test_inside_another_recording_it_warns_and_goes_on(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match=r"outer\.json\.gz is being recorded already: step 1 and on"),
        record(tmp_path / "outer.json.gz"),
    ):
        loop(record(tmp_path / "run.json.gz", schedule="1:2"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["outer.json.gz"]
    assert steps_in(tmp_path / "outer.json.gz") == ["step 0", "step 1", "step 2"]


def test_an_exception_still_writes_the_window(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), record(tmp_path / "run.json.gz", schedule="0:9"), step(0):
        raise RuntimeError("boom")
    assert steps_in(tmp_path / "run.json.gz") == ["step 0"]


def test_the_environment_says_which_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)
    loop(record(tmp_path / "run.json.gz", schedule=None), 3)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "1:2")
    loop(record(tmp_path / "run.json.gz", schedule=None), 3)
    assert steps_in(tmp_path / "run.json.gz") == ["step 1"]
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "sometimes")
    with pytest.raises(UsageError, match="sometimes"):
        record(schedule=None)


def test_a_path_that_cannot_be_written_is_refused_when_the_window_comes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a recording is a Kineto trace"):
        loop(record(tmp_path / "run.txt", schedule="0:1"), 1)


class Listening(Backend):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def pusher(self, range_: Range) -> Callable[[], None]:
        return lambda: self.told.append(range_.text)

    def start(self, range_: Range) -> object:
        self.told.append(f"start {range_.text}, {range_.category.value}")
        return "ticket"

    def end(self, started: object) -> None:
        self.told.append(f"end {started}")

    def mark(self, range_: Range) -> None:
        self.told.append(f"mark {range_.text}")


def test_a_tool_is_told_by_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Listening()
    monkeypatch.setattr(session, "backend", backend)
    tool = Tool()
    tool.start(Window(0, 0))
    tool.stop(Window(0, 0, 1))
    assert backend.told == ["start window, user", "end ticket"]
    monkeypatch.undo()
