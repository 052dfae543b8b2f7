"""Copies and pickles of models and optimizers that are being profiled, and processes that are forked meanwhile."""

import copy
import io
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvprof_kit
from nvprof_kit import LayerProfiler, MemoryProfiler, annotate_model, annotate_optimizer, count_flops, global_timer


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def memory(model: nn.Module, optimizer: Any, folder: Path) -> AbstractContextManager[Any]:
    return MemoryProfiler(model, optimizer, folder, pages=False)


def layers(model: nn.Module, optimizer: Any, folder: Path) -> AbstractContextManager[Any]:
    return LayerProfiler(model, "0:1", folder, plots=False, echo=False)


def annotated(model: nn.Module, optimizer: Any, folder: Path) -> AbstractContextManager[Any]:
    return annotate_model(model, optimizer=optimizer)


def counted(model: nn.Module, optimizer: Any, folder: Path) -> AbstractContextManager[Any]:
    return count_flops(folder / "run.flops.json")


def saved(one: Any) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "save": saved,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


@pytest.mark.parametrize("profiling", [memory, layers, annotated])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_and_its_optimizers_are_copied_as_they_are(profiling, way, sink, tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with profiling(model, optimizer, tmp_path) as active:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        twin, steps = WAYS[way]((model, optimizer))
        points = len(getattr(active, "points", ()))
        sink.lines.clear()
        twin(torch.ones(1, 2)).sum().backward()
        steps.step()
        assert sink.lines == [], "nobody has annotated the copy"
        assert len(getattr(active, "points", ())) == points
        model(torch.ones(1, 2))
        assert len(getattr(active, "points", ())) == points + (profiling is memory)
    assert type(twin) is nn.Sequential
    assert steps.param_groups[0]["params"][0] is twin[0].weight


def in_child(work: Callable[[], object]) -> None:
    """Do something in a forked process; it must not raise there."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("profiling", [memory, layers])
@torch.no_grad()  # autograd's own threads do not outlive a fork, so children run none of it
def test_a_forked_child_neither_writes_nor_ends_what_its_parent_records(profiling, tmp_path):
    model = net()
    with profiling(model, None, tmp_path) as active:
        next_step = active.step if profiling is layers else lambda: active.point("of the program")
        model(torch.ones(1, 2))

        def child() -> None:
            nn.functional.relu(torch.ones(1))
            model(torch.ones(1, 2))
            next_step()
            active.__exit__(None, None, None)

        before = files_of(tmp_path)
        in_child(child)
        assert files_of(tmp_path) == before
        next_step()
    after = files_of(tmp_path)
    assert after.keys() > before.keys() or after != before
    assert all(text.count(b"point: of the program,") <= 1 for text in after.values())


def test_a_forked_child_leaves_the_log_alone(tmp_path):
    timer = type(global_timer)(tmp_path / "time_log")
    with timer.stage("before"):
        pass
    timer.start("across")

    def child() -> None:
        timer.stop("across")
        with timer.stage("child"):
            pass
        timer.dump()
        timer._close()

    in_child(child)
    timer.stop("across")
    timer.dump()
    (log,) = (tmp_path / "time_log").iterdir()
    assert [line.split()[2].rstrip(",") for line in log.read_text().splitlines()] == ["before", "across"]


class Plain:
    """An optimizer of its own kind, as some libraries have them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[Any, Any] = {}
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_without_hooks_of_its_own(way, sink):
    optimizer = Plain(list(net().parameters()))
    with annotate_optimizer(optimizer):
        twin = WAYS[way](optimizer)
        twin.step()
        assert (twin.steps, optimizer.steps, sink.lines) == (1, 0, [])
        optimizer.step()
        assert (twin.steps, optimizer.steps, sink.lines) == (1, 1, ["optimizer"])
    assert vars(optimizer).keys() == {"param_groups", "state", "steps"}
    twin.step()
    assert twin.steps == 2


@contextmanager
def no_file_grows_beyond(count: int) -> Iterator[None]:
    """Writing more than so many bytes to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train(model: nn.Module, optimizer: Any = None) -> torch.Tensor:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model(torch.ones(1, 4)).detach()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.TransformerEncoderLayer(4, 2, 8))


@pytest.mark.parametrize("profiling", [memory, layers, annotated, counted])
def test_results_are_the_same_bit_for_bit(profiling, tmp_path):
    expected, model = train(make()), make()
    optimizer = torch.optim.AdamW(model.parameters())
    with profiling(model, optimizer, tmp_path):
        assert torch.equal(train(model, optimizer), expected)


def test_timers_stop_with_a_warning_and_leave_what_they_wrote(tmp_path):
    timer = type(global_timer)(tmp_path)
    with no_file_grows_beyond(1000), pytest.warns(UserWarning, match="nothing more is timed") as warned:
        for _ in range(100):
            with timer.stage("forward"):
                pass
        timer.dump()
    assert len(warned) == 1
    assert not timer.enabled
    assert (tmp_path / "timer_rank0.log").read_text().count("[RANK 0] forward, start=") >= 5


def test_a_memory_profile_ends_with_a_warning_and_training_goes_on(tmp_path):
    expected, model = train(make()), make()
    profiler = MemoryProfiler(model, torch.optim.AdamW(model.parameters()), folder=tmp_path)
    with no_file_grows_beyond(2000), pytest.warns(UserWarning, match="the memory profile ends") as warned, profiler:
        assert torch.equal(train(model), expected)
    assert len(warned) == 1
    assert (profiler.folder / "memory.log").read_text().startswith("Memory State:")
    with MemoryProfiler(model, None, folder=tmp_path / "again"):
        train(model)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_recording_that_cannot_be_written_is_a_warning(name, tmp_path):
    (tmp_path / name).write_text("the last one")
    recording = nvprof_kit.record(tmp_path / name)
    with no_file_grows_beyond(500), pytest.warns(UserWarning, match=f"{name} is not written"), recording:
        train(make())
    assert not recording.written
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "the last one")]
