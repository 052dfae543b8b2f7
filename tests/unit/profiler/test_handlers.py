"""What handlers make of a trace that is ready."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from nvprof_kit import Schedule, annotate_model, handlers, record, step
from nvprof_kit._instrument import rank_claim
from nvprof_kit._instrument.loop.schedule import Window

RANK = "rank0_dp0_tp0_pp0"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_claim, "_claimed", {})


def loop(path: Path, handler: object, schedule: Schedule) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with annotate_model(model), record(path, schedule=schedule, on_trace_ready=handler) as profiling:
        for number in range(6):
            with step(number):
                model(torch.ones(2, 4)).sum().backward()
            profiling.step()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RANK).iterdir() if path.name != rank_claim.OWNER)


def test_a_table_and_a_trace_for_each_step(tmp_path: Path) -> None:
    printed = io.StringIO()
    handler = handlers.together(handlers.table(file=printed), handlers.chrome_trace(tmp_path / "traces"))
    loop(tmp_path / "run.json.gz", handler, Schedule(skip_first=1, active=1, repeat=3))
    assert files(tmp_path / "traces") == [f"trace_step_{number}.json.gz" for number in (1, 2, 3)]
    assert printed.getvalue().count("Sequential") == 3 and printed.getvalue().count("1 step\n") == 3
    with gzip.open(tmp_path / "traces" / RANK / "trace_step_2.json.gz", "rt") as file:
        ours = [one["name"] for one in json.load(file)["traceEvents"] if ":step:" in str(one.get("name"))]
    assert ours == ["nvprof_kit:step:step 2"]


def test_the_layout_of_tensorboard(tmp_path: Path) -> None:
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


def test_a_kept_trace_outlives_the_next_one(tmp_path: Path) -> None:
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
def test_a_full_disk_ends_in_a_warning(handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        handler(tmp_path / "traces")(tmp_path / "run.json", Window(1, 1))
    assert files(tmp_path / "traces") == []
