"""The embedded recorder, on a model of two layers."""

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig

import nvprof_kit
import nvprof_kit._instrument.session as session
from nvprof_kit import Schedule, annotate_model, phase, record, step
from nvprof_kit._capture.recorder.record import running
from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.session import Watch
from nvprof_kit.errors import UsageError


@pytest.fixture(autouse=True)
def nobody_listens_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert session.backend is None
    yield
    assert session.backend is None and running() is None


@pytest.fixture
def model() -> Iterator[nn.Module]:
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with nvprof_kit.annotate_model(made):
        yield made


def our_events(path: Path) -> list[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("nvprof_kit:")]


def steps_in(path: Path) -> list[str]:
    return [name.rpartition(":")[2] for name in our_events(path) if name.startswith("nvprof_kit:step:")]


@pytest.mark.skipif(
    not hasattr(torch.autograd.profiler.profile, "_ensure_function_events"),
    reason="this PyTorch reads all events into Python whenever its profiler stops",
)
def test_the_events_are_not_read_into_python(model, tmp_path, monkeypatch):
    """PyTorch 2.13 at times fails to, where stacks are recorded: a name in them is no text."""

    def read(*_: object, **__: object) -> None:
        raise UnicodeDecodeError("utf-8", b"\xbb", 0, 1, "invalid start byte")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", read)
    with nvprof_kit.record(tmp_path / "run.json", stacks=True) as recording:
        model(torch.ones(2, 8))
    assert recording.written and our_events(tmp_path / "run.json")


@pytest.mark.parametrize("schedule", [{}, {"schedule": "0:9"}])
def test_an_exception_is_passed_on_and_the_trace_written(schedule, model, tmp_path):
    with pytest.raises(ZeroDivisionError), nvprof_kit.record(tmp_path / "a.json", **schedule):
        model(torch.ones(2, 8))
        raise ZeroDivisionError
    assert our_events(tmp_path / "a.json") != []


def test_decorator_records_each_call_anew(model, tmp_path):
    @nvprof_kit.record(tmp_path / "a.json")
    def train(times: int) -> None:
        for _ in range(times):
            with nvprof_kit.step(0):
                model(torch.ones(2, 8))

    train(3)
    assert our_events(tmp_path / "a.json").count("nvprof_kit:step:step 0") == 3
    train(1)
    assert our_events(tmp_path / "a.json").count("nvprof_kit:step:step 0") == 1


def test_one_recording_at_a_time(tmp_path):
    with nvprof_kit.record(tmp_path / "a.json"):
        with pytest.raises(UsageError, match=r"a\.json is being recorded; end that recording first"):
            nvprof_kit.record(tmp_path / "b.json").__enter__()
        torch.ones(2) + 1
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]
    with nvprof_kit.record(tmp_path / "b.json"):
        pass


@pytest.mark.parametrize("variable", ["NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH"])
def test_under_nsys_or_ncu_nothing_is_recorded(variable, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, "/some/library.so")
    warned = pytest.warns(UserWarning, match=r"nsys or ncu is attached .* a\.json is not recorded")
    with warned, nvprof_kit.record(tmp_path / "a.json") as recording:
        torch.ones(2) + 1
    assert not recording.written
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [("a.sqlite", "name it .json or .json.gz"), ("no/a.json", "make it first"), (".", "name it .json")],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_program_runs(path, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        nvprof_kit.record(tmp_path / path).__enter__()
    with pytest.raises(UsageError, match=message):
        loop(record(tmp_path / path, schedule="0:1"), 1)


def test_who_listened_before_a_recording_listens_again_after_it(tmp_path):
    heard: list[str] = []
    watch = Watch(SimpleNamespace(entered=lambda r: heard.append(r.text), left=lambda r: heard.append(f"end {r.text}")))
    watch.attach()
    with phase("before"):
        pass
    with record(tmp_path / "run.json"), phase("recorded"):
        pass
    with phase("after"):
        pass
    with record(tmp_path / "run.json"):
        watch.detach()
    assert heard == ["before", "end before", "after", "end after"]
    assert session.backend is None


def test_a_profiler_of_the_programs_own_ends_the_recording_with_a_warning(tmp_path):
    recording = record(tmp_path / "run.json")
    with pytest.warns(UserWarning, match=r"run\.json is not written"), recording, torch.profiler.profile():
        torch.ones(1)
    assert not recording.written
    assert list(tmp_path.iterdir()) == []
    with recording:
        torch.ones(1)
    assert (tmp_path / "run.json").exists()


@pytest.mark.skipif(
    "profile_all_threads" not in (_ExperimentalConfig.__init__.__doc__ or ""),
    reason="this PyTorch records one thread alone",
)
def test_training_on_another_thread_is_recorded(tmp_path):
    """PyTorch's profiler records the thread that starts it, and since 2.6 all others where it is asked to."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2)))

    with annotate_model(model), record(tmp_path / "run.json"), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: model(torch.randn(4, 8)).sum().backward()).result()
    rows = nvprof_kit.open(tmp_path / "run.json").layers().rows
    assert {"0", "1"} <= set(rows["layer"]) and {"forward", "backward"} <= set(rows["phase"])


def loop(profiling: record, steps: int) -> None:
    with profiling:
        for number in range(steps):
            with step(number):
                torch.ones(4, 4) @ torch.ones(4, 4)
            profiling.step()


def test_several_windows_and_their_handler(tmp_path):
    ready: list[tuple[str, Window]] = []
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=2)
    handler = lambda path, window: ready.append((path.name, window))  # noqa: E731
    loop(record(tmp_path / "run.json.gz", schedule=schedule, on_trace_ready=handler), 9)
    assert ready == [("run.1.json.gz", Window(0, 2, 3)), ("run.2.json.gz", Window(1, 6, 7))]
    assert steps_in(tmp_path / "run.2.json.gz") == ["step 6", "step 7"]


def test_a_loop_that_ends_early(tmp_path):
    loop(record(tmp_path / "cut.json.gz", schedule=(0, 100)), 2)
    assert steps_in(tmp_path / "cut.json.gz") == ["step 0", "step 1"]
    loop(record(tmp_path / "warm.json.gz", schedule=Schedule(warmup=5)), 2)
    assert not (tmp_path / "warm.json.gz").exists()


def test_inside_another_recording_it_warns_and_goes_on(tmp_path):
    with (
        pytest.warns(UserWarning, match=r"outer\.json\.gz is being recorded already: step 1 and on"),
        record(tmp_path / "outer.json.gz"),
    ):
        loop(record(tmp_path / "run.json.gz", schedule="1:2"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["outer.json.gz"]
    assert steps_in(tmp_path / "outer.json.gz") == ["step 0", "step 1", "step 2"]


def test_the_environment_says_which_steps(tmp_path, monkeypatch):
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)
    loop(record(tmp_path / "run.json.gz", schedule=None), 3)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "1:2")
    loop(record(tmp_path / "run.json.gz", schedule=None), 3)
    assert steps_in(tmp_path / "run.json.gz") == ["step 1"]
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "sometimes")
    with pytest.raises(UsageError, match="sometimes"):
        record(schedule=None)


def test_not_inside_pytorchs_own_profiler(tmp_path):
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler, pytest.raises(UsageError, match="PyTorch's profiler is already running"):
        nvprof_kit.record(tmp_path / "a.json").__enter__()
