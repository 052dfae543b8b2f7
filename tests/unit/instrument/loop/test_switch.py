"""The switch: off by default, by argument, by environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch import nn

from nvprof_kit import LayerProfiler, MemoryProfiler, Schedule, memory_snapshot
from nvprof_kit.errors import UsageError

ON = Schedule(skip_first=5, warmup=1, active=3)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (None, None),
        (False, None),
        ("off", None),
        ("0", None),
        (True, ON),
        (" ON ", ON),
        ("1", ON),
        ("4:10", Schedule.between(4, 10)),
        ((4, 10), Schedule.between(4, 10)),
        ("early", Schedule(warmup=1, active=5)),
        (Schedule(active=2), Schedule(active=2)),
    ],
)
def test_what_is_taken_for_a_switch(asked: object, meant: Schedule | None) -> None:
    assert Schedule.of(asked) == meant


def test_the_environment_is_asked_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "3:5")
    assert Schedule.of() == Schedule.between(3, 5)
    assert Schedule.of(False) is None
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "")
    assert Schedule.of() is None
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "sometimes")
    with pytest.raises(UsageError, match="sometimes"):
        Schedule.of()


def test_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    Schedule.add_argument(parser)
    assert parser.parse_args([]).profiling is None
    assert Schedule.of(parser.parse_args(["--profiling"]).profiling) == ON
    assert Schedule.of(parser.parse_args(["--profiling", "7:9"]).profiling) == Schedule.between(7, 9)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--profiling", "now and then"])
    assert ended.value.code == 2
    assert "schedule 'now and then' is none of" in capsys.readouterr().err


def test_a_wrong_argument_is_named_in_one_line(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    cases = {
        "LayerProfiler: folder=3 is no path": lambda: LayerProfiler(model, "0:1", 3),  # type: ignore[arg-type]
        "schedule=object is no schedule": lambda: LayerProfiler(model, object),  # type: ignore[arg-type]
        "MemoryProfiler: folder=3 is no path": lambda: MemoryProfiler(model, None, 3),  # type: ignore[arg-type]
        "MemoryProfiler: model is a str": lambda: MemoryProfiler("model"),  # type: ignore[arg-type]
        "str is not an optimizer": lambda: MemoryProfiler(model, "folder"),
        "stacks='cpp' is neither": lambda: memory_snapshot(tmp_path / "run.pickle", stacks="cpp"),  # type: ignore[arg-type]
    }
    for text, call in cases.items():
        with pytest.raises(UsageError) as raised:
            call()
        assert text in str(raised.value).replace(repr(object), "object")
        assert "\n" not in str(raised.value)


def test_the_folder_is_the_third_argument(tmp_path: Path) -> None:
    assert MemoryProfiler(nn.Linear(2, 2), None, str(tmp_path / "there")).folder.parent == tmp_path / "there"
