"""The switch: off by default, by argument, by environment."""

from __future__ import annotations

import argparse

import pytest

from nvprof_kit import add_profiling_argument, profiling_schedule
from nvprof_kit._instrument.loop.schedule import PRESETS, USUAL, VARIABLE, Schedule
from nvprof_kit.errors import UsageError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (None, None),
        (False, None),
        ("off", None),
        ("0", None),
        (True, USUAL),
        (" ON ", USUAL),
        ("1", USUAL),
        ("4:10", Schedule.between(4, 10)),
        ((4, 10), Schedule.between(4, 10)),
        ("early", PRESETS["early"]),
        (Schedule(active=2), Schedule(active=2)),
    ],
)
def test_what_is_taken_for_a_switch(asked: object, meant: Schedule | None) -> None:
    assert profiling_schedule(asked) == meant


def test_the_environment_is_asked_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3:5")
    assert profiling_schedule() == Schedule.between(3, 5)
    assert profiling_schedule(False) is None
    monkeypatch.setenv(VARIABLE, "")
    assert profiling_schedule() is None
    monkeypatch.setenv(VARIABLE, "sometimes")
    with pytest.raises(UsageError, match="sometimes"):
        profiling_schedule()


def test_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_profiling_argument(parser)
    assert parser.parse_args([]).profiling is None
    assert profiling_schedule(parser.parse_args(["--profiling"]).profiling) == USUAL
    assert profiling_schedule(parser.parse_args(["--profiling", "7:9"]).profiling) == Schedule.between(7, 9)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--profiling", "now and then"])
    assert ended.value.code == 2
    assert "schedule 'now and then' is none of" in capsys.readouterr().err
