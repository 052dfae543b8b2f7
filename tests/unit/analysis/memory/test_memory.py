"""Snapshots in, who held the memory out."""

import io
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.brute_force.caching_allocator import Replay
from support.captures.snapshot_file import SnapshotFile, training
from support.data import unpacked
from support.lane import examples

from nvprof_kit import Memory, MemorySnapshot, open_snapshot
from nvprof_kit.errors import CaptureError


def read(file: SnapshotFile, folder: Path) -> MemorySnapshot:
    return open_snapshot(file.write(folder / "run.pickle"))


def test_without_history_the_segments_remain(tmp_path):
    file = SnapshotFile()
    file.alloc(100, event=False)
    result = read(file, tmp_path).memory()
    assert result.summary.peak_bytes == 100
    assert "no history" in result.warnings[0]
    assert result.layer["bytes"].sum() == 100
    assert "<svg" in result.save(tmp_path / "x.svg").read_text()


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=40), st.integers(0, 3))
def test_nothing_is_lost(tmp_path_factory, actions, early):
    """At the peak, and at every moment, blocks by layer and what was before add up to the level."""
    file = SnapshotFile()
    live = [file.alloc(512, event=False) for _ in range(early)]
    old = [*live]
    level, levels, before = 512 * early, [], []
    for which, size, free in actions:
        if free and live:
            addr = live.pop(which % len(live))
            level -= file.live[addr][0]
            old = [other for other in old if other != addr]
            file.free(addr, completed=False)
        else:
            live.append(file.alloc(512 * size, f"nvprof_kit:forward:layers.{which};step={which}"))
            level += 512 * size
        levels.append(level)
        before.append(512 * len(old))
    if not file.live and not levels:
        return
    result = read(file, tmp_path_factory.mktemp("run")).memory()
    assert result.level_bytes.tolist() == levels
    peak = max(levels, default=level)
    for table in (result.layer, result.stack, result.size):
        assert table["bytes"].sum() == peak == result.summary.peak_bytes
    for event, expected in enumerate(levels):
        present = result.held[(result.held["start"] <= event) & (result.held["end"] > event)]
        assert present["size_bytes"].sum() + before[event] == expected


def test_the_report_the_page_and_the_plots(tmp_path):
    snapshot = read(training(3000, layers=3), tmp_path)
    result = snapshot.memory()
    console = Console(file=io.StringIO(), width=160)
    console.print(result)
    text = console.file.getvalue()
    for part in ("At the peak, by layer", "model.layers.2", "From step to step", "log.py:3 remember", "Segments"):
        assert part in text
    page = result.page().decode()
    assert page.count("<svg") == 2
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page
    assert snapshot.memory("segment").save(tmp_path / "x.svg").read_bytes().startswith(b"<?xml")
    assert np.all(result.reserved_bytes == result.reserved_bytes[0])


def test_a_program_without_our_labels_has_the_phases_that_pytorch_annotates(tmp_path):
    file = SnapshotFile()
    for label in ("", "", "nvprof_kit:forward:layers.0;step=7", ";step=7", ""):
        file.alloc(1000, label)
    made = file.snapshot()
    times = [event["time_us"] for event in made["device_traces"][0]]
    made["external_annotations"] = [
        {"stage": stage, "name": name, "device": device, "time_us": times[place] + after}
        for place, after, stage, name, device in (
            (0, -2, "END", "Optimizer.step#AdamW.step", 0),  # its begin was before the history
            (1, -2, "START", "ProfilerStep#3", 0),
            (1, -1, "START", "Optimizer.step#AdamW.step", 0),
            (3, 1, "END", "Optimizer.step#AdamW.step", 0),
            (3, 2, "END", "ProfilerStep#3", 0),
            (0, -1, "START", "Optimizer.zero_grad#AdamW.zero_grad", 1),  # of another device
        )
    ]
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(made))
    held = open_snapshot(tmp_path / "run.pickle").memory(device=0).held
    assert held["phase"].tolist() == ["other", "optimizer", "forward", "optimizer", "other"]
    assert held["layer"].tolist() == ["(none)", "(none)", "layers.0", "(none)", "(none)"]
    assert held["step"].fillna(-1).tolist() == [-1, 3, 7, 7, -1]


def test_devices(tmp_path):
    file = SnapshotFile(device=2)
    file.alloc(100)
    snapshot = read(file, tmp_path)
    assert snapshot.memory().summary.device == 2
    with pytest.raises(CaptureError, match="nothing of device 0 in it; it has device 2"):
        snapshot.memory(device=0)
    with pytest.raises(CaptureError, match="empty snapshot"):
        read(SnapshotFile(), tmp_path).memory()


DATA = Path(__file__).parents[3] / "data" / "snapshots"
MAX_MEMORY_ALLOCATED = 187_992_576
MEMORY_ALLOCATED = 98_619_392
MEMORY_RESERVED = 203_423_744
"""What the program read of ``torch.cuda`` at its end."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    for packed in DATA.glob("*.pickle.xz"):
        unpacked(packed, folder / packed.stem)
    return folder


@pytest.fixture(scope="module")
def run(plain: Path) -> Memory:
    return open_snapshot(plain / "run-2.11.pickle").memory()


def test_the_end_is_what_pytorch_counted(run):
    assert run.summary.allocated_bytes == MEMORY_ALLOCATED
    assert run.summary.reserved_bytes == MEMORY_RESERVED
    assert int(run.level_bytes[-1]) == MEMORY_ALLOCATED, "no tensor that is left was rounded up"


def test_the_peak_is_what_was_asked_for(run, plain):
    """``max_memory_allocated`` counts blocks; the events, and so the verb, count what tensors asked for.

    At the peak blocks are 2,098,648 bytes larger: three little tensors of 4, 4 and 32 bytes in blocks of 512 (1,496
    bytes), and two large blocks that each had 1 MiB left, which is too little for PyTorch to split it off.
    """
    events: list[dict[str, Any]] = pickle.loads((plain / "run-2.11.pickle").read_bytes())["device_traces"][0]
    replayed = Replay(events)
    assert run.summary.peak_bytes == replayed.asked == 185_893_928
    assert replayed.allocated == MAX_MEMORY_ALLOCATED
    assert replayed.allocated - replayed.asked == (512 - 4) + (512 - 4) + (512 - 32) + 2 * (1 << 20)
    for table in (run.layer, run.stack, run.size):
        assert int(table["bytes"].sum()) == run.summary.peak_bytes


def test_autograd_s_thread_is_told_before_it_comes_to_a_layer(run):
    """What the loss needs backward is allocated by a thread that bears no label yet, in each of the four steps."""
    own = run.held[(run.held["layer"] == "(none)") & (run.held["phase"] == "backward")]
    assert own.groupby(own["step"].astype("int64")).size().to_dict() == dict.fromkeys(range(4), 5)


def test_layers_and_steps_and_the_leak(run):
    assert run.summary.labelled > 0.7
    assert {f"layers.{n}" for n in range(4)} <= set(run.layer["layer"])
    assert run.step["step"].tolist() == [0, 1, 2, 3]
    assert run.step["growth_bytes"].tolist()[2:] == [4 << 20, 4 << 20], "4 MiB are left behind by each step"
    (leak,) = run.leak.to_dict("records")
    assert (leak["steps"], leak["bytes_per_step"]) == (4, 4 << 20)
    assert leak["stack"].startswith("snapshot.py:38 train")


@pytest.mark.parametrize("by", ["layer", "stack", "step", "allocation", "leak"])
def test_golden_tables(run, by, golden, tmp_path):
    golden(f"memory/run-2.11.{by}.csv", replace(run, view=by).save(tmp_path / "out.csv").read_text())


def test_a_snapshot_of_one_step_and_of_running_out(plain):
    step = open_snapshot(plain / "step-2.11.pickle").memory()
    assert step.step["step"].tolist() == [0, 1], "written when step 1 ended"
    assert "Left behind by step after step\nnone" in str(replace(step, view="leak"))
    oom = open_snapshot(plain / "oom_oom-2.11.pickle").memory()
    assert oom.summary.ooms == (4 << 40,), "a float for each of 1 << 40 numbers"
    assert any("out of memory 1 time;" in warning for warning in oom.warnings)


@pytest.mark.parametrize("mode", ["fast", "dladdr", "addr2line"])
def test_no_stack_is_headed_by_the_allocator_or_the_unwinder(mode, plain):
    """C++ frames (``stacks="all"``) in all of PyTorch's ways to name them; what a stack is headed by allocated it."""
    found = open_snapshot(plain / f"cpp-{mode}-2.11.pickle").memory().stack
    heads = [str(stack).split(" < ")[0] for stack in found["stack"]]
    assert len(heads) > 8
    for head in heads:
        assert not re.search(r"unwind|allocator|Traceback|gather|c10::Storage|DataPtr|malloc|::empty|^\W*$", head, re.I)
    # the largest blocks: activations of the forward, the workspace of cuBLAS, gradients and states of the optimizer
    assert [head.partition(" ")[2] for head in heads if ".py:" in head][:3] == ["train", "train", "model_of"]
    assert sum("CUDABlasHandle" in head or "setWorkspaceForHandle" in head for head in heads) == 1
