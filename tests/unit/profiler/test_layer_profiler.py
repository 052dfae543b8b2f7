"""`LayerProfiler` around real loops on the CPU: what it leaves, what it never does, and how it takes trouble."""

import errno
import gzip
import io
import itertools
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.ranges.sink import Sink
from torch import nn

import nvprof_kit
import nvprof_kit._instrument.session as session
from nvprof_kit import LayerProfiler, Schedule, Throughput, annotate_model, handlers, record, step
from nvprof_kit._capture.recorder import record as record_module
from nvprof_kit._instrument import ranks
from nvprof_kit._instrument.loop.schedule import SCHEDULE_VARIABLE, Window
from nvprof_kit._instrument.memory.allocator import Counts
from nvprof_kit._profiler import cost, layer_profiler

RANK = "rank0_dp0_tp0_pp0"
PLAIN = {"trace.json.gz", "layers.csv", "kinds.csv", "rank_0.log"}


@pytest.fixture(autouse=True)
def nobody_listens_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SCHEDULE_VARIABLE, raising=False)
    monkeypatch.setattr(ranks, "_claimed", {})
    assert session.backend is None
    yield
    assert session.backend is None and record_module._running is None


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.proj(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spatial_blocks = nn.ModuleList(Block() for _ in range(2))
        self.temporal_blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            x = temporal(spatial(x))
        return self.head(x)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(torch.randn(8, 16)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def loop(self, profiling: LayerProfiler, steps: int) -> None:
        with profiling:
            for _ in range(steps):
                self.step()
                profiling.step()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return dict(folder=tmp_path / "traces", plots=False, echo=False)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RANK).iterdir() if path.name != ranks.OWNER)


def names(options: dict[str, Any]) -> set[str]:
    return set(files(options["folder"]))


def test_it_leaves_the_files_of_the_documents(tmp_path, capsys):
    training = Training()
    options = dict(folder=tmp_path / "traces", throughput=Throughput(samples=8))
    profiling = LayerProfiler(training.model, "3:5", **options)
    training.loop(profiling, 7)
    assert names(options) == {f"Net_{name}" for name in PLAIN | {"cuda_time_plot.png"}}
    (one,) = profiling.recorded
    assert (one.window.first_step, one.window.last_step) == (3, 4)
    log = (tmp_path / "traces" / RANK / "Net_rank_0.log").read_text()
    assert log.startswith("Net · rank 0 · steps 3 to 4\n")
    assert "Own cost: a recorded step took " in log and ", a plain one " in log
    assert "Block in spatial_blocks " in log and "Block in temporal_blocks " in log
    assert "layer                step 3  step 4\n" in log
    printed = capsys.readouterr().out
    assert "Own cost: " in printed and "Files: " in printed and "step 3  step 4" not in printed


def test_the_figures_are_those_of_the_trace(options):
    training = Training()
    profiling = LayerProfiler(training.model, "2:5", **options)
    training.loop(profiling, 5)
    (one,) = profiling.recorded
    verb = nvprof_kit.open(one.trace).layers(by="step", steps=nvprof_kit.StepOptions(first=2))
    assert verb.rows["step"].dropna().unique().tolist() == [2, 3, 4]
    assert one.profile.rows["gpu_self_ns"].sum() == verb.summary.total_ns
    rows = one.profile.rows[one.profile.rows["layer"] != "(none)"]
    keys = ["step", "layer", "phase"]
    both = rows.merge(verb.rows, on=keys, suffixes=("", "_verb"))
    assert len(both) == len(rows) and (both["cpu_ns"] == both["cpu_ns_verb"]).all() and (both["calls"] == 1).all()
    table = pd.read_csv(one.trace.with_name("Net_layers.csv"))
    assert table["gpu_ns"].tolist() == one.profile.rows["gpu_ns"].tolist()
    kinds = one.profile.kinds.set_index("kind")
    assert kinds.loc["Block in spatial_blocks", "count"] == 6  # two blocks in three steps


def test_a_decorated_step(options):
    training = Training()
    profiling = LayerProfiler(training.model, "2:4", **options)
    run = profiling(training.step)
    for _ in range(6):
        run()
    assert [one.profile.layers.summary.steps for one in profiling.recorded] == [2]
    assert run.__name__ == "step"
    profiling.__exit__()


def test_the_loops_own_steps(options):
    """Steps that the loop ranges itself: the profiler's count, or, where it is told so, the loop's."""
    for own, expected in ((True, [1, 2]), (False, [1001, 1002])):
        training = Training()
        with LayerProfiler(training.model, "1:3", **options, steps=own) as profiling:
            for number in range(1000, 1004):
                with step(number):
                    training.step()
                profiling.step()
        (one,) = profiling.recorded
        assert one.profile.rows["step"].dropna().unique().tolist() == expected
        assert one.profile.layers.summary.steps == 2


def test_memory_beside_time(options, monkeypatch):
    """The way of the allocator's counts into the files; that they are true is shown on a GPU."""
    grows = itertools.count(1000, 1000)
    counts = lambda _device: Counts(size := next(grows), size, 1 << 20, size + 500)  # noqa: E731
    monkeypatch.setattr(layer_profiler, "cuda_counts", counts)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    training = Training()
    profiling = LayerProfiler(training.model, "1:3", options["folder"], echo=False)
    training.loop(profiling, 3)
    assert {"Net_memory_usage.txt", "Net_memory_usage_line_chart.png"} <= names(options)
    rows = profiling.recorded[0].profile.rows
    head = rows[(rows["layer"] == "head") & (rows["phase"] == "forward")]
    # between its begin and its end nothing else is asked: it leaves 1000 bytes, and the peak of its end is 500 above
    assert head["retained_bytes"].tolist() == [1000, 1000] and head["transient_bytes"].tolist() == [500, 500]
    text = (options["folder"] / RANK / "Net_memory_usage.txt").read_text().splitlines()
    assert text[0] == "step 1" and "step 2" in text
    assert sum("head forward: allocated 0." in line for line in text) == 2


def test_off_is_nothing_at_all(options):
    for schedule in (None, False, "off"):
        training = Training()
        profiling = LayerProfiler(training.model, schedule, **options)
        assert not profiling.enabled and profiling(training.step).__func__ is Training.step
        training.loop(profiling, 3)
        assert profiling.recorded == []
    assert not options["folder"].exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), torch.cuda.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()]
)
def test_what_the_program_raises_goes_through_and_the_window_is_written(options, error):
    training = Training()

    def fail(*_call: object) -> None:
        raise error

    with pytest.raises(type(error)), LayerProfiler(training.model, "1:9", **options) as profiling:
        training.step()
        profiling.step()
        training.step()
        profiling.step()
        training.model.temporal_blocks[0].proj.register_forward_hook(fail)
        training.step()
    (one,) = profiling.recorded
    assert one.window.last_step == 1
    assert {f"Net_{name}" for name in PLAIN} == names(options)


def test_a_broken_gpu_does_not_hide_what_the_program_raised(options, monkeypatch):
    """After a device-side assert every call of CUDA raises, ours too."""
    training = Training()

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with (
        pytest.warns(UserWarning, match="LayerProfiler stops: RuntimeError: CUDA error"),
        pytest.raises(ValueError, match="the program's own"),
        LayerProfiler(training.model, "0:9", **options),
    ):
        training.step()
        monkeypatch.setattr(cost, "_now", broken)
        raise ValueError("the program's own")


def test_under_a_tool_the_tool_records(options, monkeypatch):
    monkeypatch.setattr(layer_profiler, "tool_attached", lambda: True)
    sink = Sink()
    session.activate(sink)
    try:
        training = Training()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training.loop(LayerProfiler(training.model, "1:2", **options), 3)
    finally:
        session.deactivate()
    assert sink.lines[:4] == ["start window", "step 1", "  Net", "    spatial_blocks.0"]
    assert sink.lines[-1] == "end window" and sink.open_count() == 0
    assert not options["folder"].exists()


def test_a_memory_profiler_around_it(options, tmp_path):
    """One switch for both, as InternLM's ``--profiling`` is."""
    training = Training()
    with nvprof_kit.MemoryProfiler(training.model, training.optimizer, tmp_path / "memory", pages=False) as memory:
        profiling = LayerProfiler(training.model, "1:2", **options)
        training.loop(profiling, 3)
    assert len(profiling.recorded) == 1
    assert [point.name for point in memory.points][-1] == "step 2 optimizer"


def test_a_loop_that_ends_before_says_so(options):
    with pytest.warns(UserWarning, match="recorded nothing: the loop ended in step 2"):
        Training().loop(LayerProfiler(Net(), "10:12", **options), 2)


def test_an_annotation_of_the_users_own_stays(options):
    training = Training()
    handle = annotate_model(training.model, depth=1)
    profiling = LayerProfiler(training.model, "0:1", **options)
    training.loop(profiling, 1)
    assert set(profiling.recorded[0].profile.rows["layer"]) == {*handle.paths, "(none)"}
    assert training.model in session.annotated
    handle.remove()


def test_a_kind_of_which_nothing_ran_is_a_warning(options):
    training = Training()
    kinds = {"temporal_blocks.*": "temporal", "spatial_blocks": "list", "*.nosuch": "none"}
    profiling = LayerProfiler(training.model, "0:1", **options, kinds=kinds)
    with pytest.warns(UserWarning, match=r"no layer that ran matches 'spatial_blocks', '\*\.nosuch'; needed"):
        training.loop(profiling, 1)


@pytest.mark.parametrize("before", [True, False])
def test_writing_and_reading_a_trace_is_no_step_of_the_throughput(options, before):
    meter = Throughput[object](warm_up=1)
    options = dict(options, throughput=meter)
    training = Training()
    handler = lambda *_: time.sleep(1)  # noqa: E731
    with LayerProfiler(training.model, "1:3", **options, on_trace_ready=handler) as profiling:
        for _ in range(4):
            training.step()
            if before:
                meter.step()
            profiling.step()
            if not before:
                meter.step()
    assert meter.summary().steps == 3
    assert meter.summary().batch_cost.max < 1


def test_sampling_during_the_window(options):
    pytest.importorskip("psutil")
    pytest.importorskip("pynvml")
    training = Training()
    training.loop(LayerProfiler(training.model, "1:2", **options, utilisation=True), 2)
    assert "Net_utilisation.csv" in names(options)
    assert "\nCPU: process " in (options["folder"] / RANK / "Net_rank_0.log").read_text()


def loop(path: Path, handler: object, schedule: Schedule) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with annotate_model(model), record(path, schedule=schedule, on_trace_ready=handler) as profiling:
        for number in range(6):
            with step(number):
                model(torch.ones(2, 4)).sum().backward()
            profiling.step()


def test_a_table_and_a_trace_for_each_step(tmp_path):
    printed = io.StringIO()
    handler = handlers.together(handlers.table(file=printed), handlers.chrome_trace(tmp_path / "traces"))
    loop(tmp_path / "run.json.gz", handler, Schedule(skip_first=1, active=1, repeat=3))
    assert files(tmp_path / "traces") == [f"trace_step_{number}.json.gz" for number in (1, 2, 3)]
    assert printed.getvalue().count("Sequential") == 3 and printed.getvalue().count("1 step\n") == 3
    with gzip.open(tmp_path / "traces" / RANK / "trace_step_2.json.gz", "rt") as file:
        ours = [one["name"] for one in json.load(file)["traceEvents"] if ":step:" in str(one.get("name"))]
    assert ours == ["nvprof_kit:step:step 2"]


def test_the_layout_of_tensorboard(tmp_path):
    """The names of torch.profiler's own handler, which its plug-in and Holistic Trace Analysis look for."""
    loop(tmp_path / "run.json.gz", handlers.tensorboard(tmp_path / "ours"), Schedule(active=1, repeat=2))
    ours = files(tmp_path / "ours")
    assert len(ours) == 2
    ready = torch.profiler.tensorboard_trace_handler(str(tmp_path / "theirs"), use_gzip=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=ready):
        torch.ones(2) + 1
    (theirs,) = (path.name for path in (tmp_path / "theirs").iterdir())
    form = re.compile(r"(.+_\d+)\.\d{16,}\.pt\.trace\.json\.gz")
    assert {form.fullmatch(name).group(1) for name in ours} == {form.fullmatch(theirs).group(1)}


def test_a_kept_trace_outlives_the_next_one(tmp_path):
    trace = tmp_path / "run.json.gz"
    keep = handlers.chrome_trace(tmp_path)
    for number in (1, 2, 2):
        fresh = tmp_path / "fresh"
        fresh.write_text(str(number))
        fresh.replace(trace)
        keep(trace, Window(0, number, number))
    keep(trace, Window(0, 2, 2))  # again, of the same file
    assert files(tmp_path) == ["trace_step_1.json.gz", "trace_step_2.json.gz"]
    assert (tmp_path / RANK / "trace_step_1.json.gz").read_text() == "1"


@pytest.mark.parametrize("handler", [handlers.chrome_trace, handlers.tensorboard])
def test_a_full_disk_ends_in_a_warning(handler, tmp_path, monkeypatch):
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        handler(tmp_path / "traces")(tmp_path / "run.json", Window(1, 1))
    assert files(tmp_path / "traces") == []
