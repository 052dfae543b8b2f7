"""Schedules: which steps are recorded, and what a sink is told along a loop."""

import argparse
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nvprof_kit
from nvprof_kit import LayerProfiler, MemoryProfiler, memory_snapshot
from nvprof_kit._instrument.loop.schedule import PRESETS, Schedule, Window, Windows
from nvprof_kit.errors import UsageError

LETTERS = {"NONE": ".", "WARMUP": "w", "RECORD": "r", "RECORD_AND_SAVE": "R"}


class Log:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Window | None]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda window=None: self.told.append((name, window))


def walk(schedule: Schedule, steps: int) -> list[tuple[str, Window | None]]:
    log = Log()
    with Windows(schedule, log) as windows:
        for _ in range(steps):
            windows.step()
    return log.told


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        (Schedule(), "R.."),
        (Schedule(active=3), "rrR.."),
        (Schedule(skip_first=3, wait=2, warmup=1, active=3, repeat=0), ".....wrrR..wrrR..wrrR"),
        (Schedule(skip_first=1, wait=1, active=1, repeat=2), "..R.R..."),
        (Schedule(repeat=0), "RRRR"),
        ((4, 10), "...wrrrrrR.."),  # records steps 4 to 9
        ((0, 2), "rR.."),
        ((1, 2), "wR.."),
        ("4:10", "...wrrrrrR.."),
        ("skip_first=2, active=2", "..rR.."),
        ("early", "wrrrrR.."),
        ("stable", "." * 50 + (".....ww" + "r" * 9 + "R") * 2 + "." * 6),
        ("periodic", "." * 10 + ".....wwrrR" * 5 + "." * 5),
    ],
)
def test_steps(asked, steps):
    schedule = Schedule.of(asked)
    assert schedule is not None
    assert "".join(LETTERS[schedule(step).name] for step in range(len(steps))) == steps


@given(
    st.builds(
        Schedule,
        skip_first=st.integers(0, 5),
        wait=st.integers(0, 4),
        warmup=st.integers(0, 4),
        active=st.integers(1, 5),
        repeat=st.integers(0, 4),
    ),
    st.integers(0, 60),
)
def test_every_schedule_agrees_with_itself(schedule, steps):
    assert Schedule.parse(str(schedule)) == schedule
    recorded = [step for step in range(steps) if schedule(step).records]
    last = schedule.last_step
    assert all(last is None or step <= last for step in recorded)
    told = [window for what, window in walk(schedule, steps) if what == "stop" and window is not None]
    walked = [step for window in told for step in range(window.first_step, window.last_step + 1)]
    if steps:  # a loop that never says that a step is over is taken for one step
        assert walked == recorded
    assert [window.number for window in told] == list(range(len(told)))


def test_agrees_with_torch():
    profiler = pytest.importorskip("torch.profiler")
    for schedule in (*PRESETS.values(), Schedule(skip_first=2, wait=1, warmup=1, active=2, repeat=0)):
        theirs = profiler.schedule(**vars(schedule))
        ours = schedule.for_torch()
        assert [ours(step) for step in range(100)] == [theirs(step) for step in range(100)]


def test_what_a_sink_is_told():
    assert walk(Schedule(skip_first=1, warmup=2, active=2, repeat=2), 12) == [
        ("warm_up", Window(0, 3)),
        ("start", Window(0, 3)),
        ("stop", Window(0, 3, 4)),
        ("warm_up", Window(1, 7)),
        ("start", Window(1, 7)),
        ("stop", Window(1, 7, 8)),
    ]


@pytest.mark.parametrize("asked", ["late", "3:", "5:5", "7:5", "1:2:3", "active=x", "active=0", "steps=3", "a=b=c"])
def test_what_is_no_schedule_is_refused_in_one_line(asked):
    with pytest.raises(UsageError) as refused:
        Schedule.of(asked)
    assert "\n" not in str(refused.value) and "schedule" in str(refused.value)


ON = Schedule(skip_first=5, warmup=1, active=3)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)


@pytest.mark.parametrize(
    ("asked", "meant"), [(None, None), (False, None), ("off", None), ("0", None), (True, ON), (" ON ", ON), ("1", ON)]
)
def test_what_is_taken_for_a_switch(asked, meant):
    assert Schedule.of(asked) == meant


def test_the_environment_is_asked_where_nothing_is_said(monkeypatch):
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "3:5")
    assert Schedule.of() == Schedule.between(3, 5)
    assert Schedule.of(False) is None
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "")
    assert Schedule.of() is None
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "sometimes")
    with pytest.raises(UsageError, match="sometimes"):
        Schedule.of()


def test_the_argument(capsys):
    parser = argparse.ArgumentParser()
    Schedule.add_argument(parser)
    assert parser.parse_args([]).profiling is None
    assert Schedule.of(parser.parse_args(["--profiling"]).profiling) == ON
    assert Schedule.of(parser.parse_args(["--profiling", "7:9"]).profiling) == Schedule.between(7, 9)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--profiling", "now and then"])
    assert ended.value.code == 2
    assert "schedule 'now and then' is none of" in capsys.readouterr().err


def test_a_wrong_argument_is_named_in_one_line(tmp_path):
    model = nn.Linear(2, 2)
    cases = {
        "LayerProfiler: folder is 3; needed a path": lambda: LayerProfiler(model, "0:1", 3),
        "schedule=object is no schedule": lambda: LayerProfiler(model, object),
        "MemoryProfiler: folder is 3; needed a path": lambda: MemoryProfiler(model, None, 3),
        "MemoryProfiler: model is 'model'": lambda: MemoryProfiler("model"),
        "record: path is 5; needed a path": lambda: nvprof_kit.record(5),
        "schedule=3 is no schedule": lambda: nvprof_kit.record(schedule=3),
        "no step lies from 1 up to a": lambda: nvprof_kit.record(schedule=(1, "a")),
        "LayerProfiler: model is 'm'": lambda: LayerProfiler("m", "0:1"),
        "memory_snapshot: at_step is 'x'": lambda: memory_snapshot("a", at_step="x"),
        "annotate_model: select is 5": lambda: nvprof_kit.annotate_model(model, select=5),
        "annotate_model: methods is 5": lambda: nvprof_kit.annotate_model(model, methods=5),
        "annotate_model: memory is 5": lambda: nvprof_kit.annotate_model(model, memory=5),
        "step: number is 'x'": lambda: nvprof_kit.step("x"),
        "needed a function, a class or a name": lambda: nvprof_kit.layer_range(5),
        "generation: model is 5": lambda: nvprof_kit.generation(5),
        "count_flops: path is 5": lambda: nvprof_kit.count_flops(5),
        "Throughput: samples is 'x'": lambda: nvprof_kit.Throughput(samples="x"),
        "Utilisation: interval_s is 'x'": lambda: nvprof_kit.Utilisation("x"),
        "str is not an optimizer": lambda: MemoryProfiler(model, "folder"),
        "stacks='cpp': no such choice": lambda: memory_snapshot(tmp_path / "run.pickle", stacks="cpp"),
    }
    for text, call in cases.items():
        with pytest.raises(UsageError) as raised:
            call()
        assert text in str(raised.value).replace(repr(object), "object")
        assert "\n" not in str(raised.value)
