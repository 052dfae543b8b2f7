"""The switch: off by default, by argument, by environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch import nn

import nvprof_kit
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
        "LayerProfiler: folder is 3; needed a path": lambda: LayerProfiler(model, "0:1", 3),  # type: ignore[arg-type]
        "schedule=object is no schedule": lambda: LayerProfiler(model, object),  # type: ignore[arg-type]
        "MemoryProfiler: folder is 3; needed a path": lambda: MemoryProfiler(model, None, 3),  # type: ignore[arg-type]
        "MemoryProfiler: model is 'model'": lambda: MemoryProfiler("model"),  # type: ignore[arg-type]
        "record: path is 5; needed a path": lambda: nvprof_kit.record(5),  # type: ignore[arg-type]
        "schedule=3 is no schedule": lambda: nvprof_kit.record(schedule=3),  # type: ignore[arg-type]
        "no step lies from 1 up to a": lambda: nvprof_kit.record(schedule=(1, "a")),  # type: ignore[arg-type]
        "LayerProfiler: model is 'm'": lambda: LayerProfiler("m", "0:1"),  # type: ignore[arg-type]
        "memory_snapshot: at_step is 'x'": lambda: memory_snapshot("a", at_step="x"),  # type: ignore[arg-type]
        "annotate_model: select is 5": lambda: nvprof_kit.annotate_model(model, select=5),  # type: ignore[arg-type]
        "annotate_model: methods is 5": lambda: nvprof_kit.annotate_model(model, methods=5),  # type: ignore[arg-type]
        "annotate_model: memory is 5": lambda: nvprof_kit.annotate_model(model, memory=5),  # type: ignore[arg-type]
        "step: number is 'x'": lambda: nvprof_kit.step("x"),  # type: ignore[arg-type]
        "needed a function, a class or a name": lambda: nvprof_kit.layer_range(5),  # type: ignore[arg-type]
        "generation: model is 5": lambda: nvprof_kit.generation(5),  # type: ignore[arg-type]
        "count_flops: path is 5": lambda: nvprof_kit.count_flops(5),  # type: ignore[arg-type]
        "Throughput: samples is 'x'": lambda: nvprof_kit.Throughput(samples="x"),  # type: ignore[arg-type]
        "Utilisation: interval_s is 'x'": lambda: nvprof_kit.Utilisation("x"),  # type: ignore[arg-type]
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
