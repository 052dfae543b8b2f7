"""A disk that is full, or a folder that goes away, costs the profile and never the program."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from nvprof_kit import MemoryProfiler, global_timer, record


@contextmanager
def no_file_grows_beyond(count: int) -> Iterator[None]:
    """Writing more than so many bytes to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model(torch.ones(1, 4)).detach()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_timers_stop_with_a_warning_and_leave_what_they_wrote(tmp_path: Path) -> None:
    timer = type(global_timer)(tmp_path)
    with no_file_grows_beyond(1000), pytest.warns(UserWarning, match="nothing more is timed") as warned:
        for _ in range(100):
            with timer.stage("forward"):
                pass
        timer.dump()
    assert len(warned) == 1
    assert not timer.enabled
    assert (tmp_path / "timer_rank0.log").read_text().count("[RANK 0] forward, start=") >= 5


def test_a_memory_profile_ends_with_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    model, expected = make(), train(make())
    profiler = MemoryProfiler(model, torch.optim.AdamW(model.parameters()), folder=tmp_path)
    with no_file_grows_beyond(2000), pytest.warns(UserWarning, match="the memory profile ends") as warned, profiler:
        assert torch.equal(train(model), expected)
    assert len(warned) == 1
    assert (profiler.folder / "memory.log").read_text().startswith("Memory State:")
    with MemoryProfiler(model, None, folder=tmp_path / "again"):
        train(model)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_recording_that_cannot_be_written_is_a_warning(name: str, tmp_path: Path) -> None:
    recording = record(tmp_path / name)
    with no_file_grows_beyond(500), pytest.warns(UserWarning, match=f"{name} is not written"), recording:
        train(make())
    assert not recording.written
    assert list(tmp_path.iterdir()) == []
