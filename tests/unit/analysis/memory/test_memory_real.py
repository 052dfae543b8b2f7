"""Snapshots of an H200 (``tests/gpu/programs/snapshot.py``, PyTorch 2.11): what PyTorch counted is found again."""

from __future__ import annotations

import lzma
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.brute_force.caching_allocator import Replay
from support.golden import Golden

from nvprof_kit import Memory, open_snapshot

DATA = Path(__file__).parents[3] / "data" / "snapshots"

MAX_MEMORY_ALLOCATED = 187_992_576
MEMORY_ALLOCATED = 98_619_392
MEMORY_RESERVED = 203_423_744
"""What the program read of ``torch.cuda`` at its end."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    for packed in DATA.glob("*.pickle.xz"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="module")
def run(plain: Path) -> Memory:
    return open_snapshot(plain / "run-2.11.pickle").memory()


def test_the_end_is_what_pytorch_counted(run: Memory) -> None:
    assert run.summary.allocated_bytes == MEMORY_ALLOCATED
    assert run.summary.reserved_bytes == MEMORY_RESERVED
    assert int(run.level_bytes[-1]) == MEMORY_ALLOCATED, "no tensor that is left was rounded up"


def test_the_peak_is_what_was_asked_for(run: Memory, plain: Path) -> None:
    """``max_memory_allocated`` counts blocks; the events, and so the verb, count what tensors asked for.

    At the peak blocks are 2,098,648 bytes larger: three little tensors of 4, 4 and 32 bytes in blocks of 512 (1,496
    bytes), and two large blocks that each had 1 MiB left, which is too little for PyTorch to split it off.
    """
    events: list[dict[str, Any]] = pickle.loads((plain / "run-2.11.pickle").read_bytes())["device_traces"][0]
    replayed = Replay(events)
    assert run.summary.peak_bytes == replayed.asked == 185_893_928
    assert replayed.allocated == MAX_MEMORY_ALLOCATED
    assert replayed.allocated - replayed.asked == (512 - 4) + (512 - 4) + (512 - 32) + 2 * (1 << 20)
    for table in (run.by_layer, run.by_stack, run.by_size):
        assert int(table["bytes"].sum()) == run.summary.peak_bytes


def test_autograd_s_thread_is_told_before_it_comes_to_a_layer(run: Memory) -> None:
    """What the loss needs backward is allocated by a thread that bears no label yet, in each of the four steps."""
    own = run.held[(run.held["layer"] == "(none)") & (run.held["phase"] == "backward")]
    assert own.groupby(own["step"].astype("int64")).size().to_dict() == dict.fromkeys(range(4), 5)


def test_layers_and_steps_and_the_leak(run: Memory) -> None:
    assert run.summary.labelled > 0.7
    assert {f"layers.{n}" for n in range(4)} <= set(run.by_layer["layer"])
    assert run.steps["step"].tolist() == [0, 1, 2, 3]
    assert run.steps["growth_bytes"].tolist()[2:] == [4 << 20, 4 << 20], "4 MiB are left behind by each step"
    (leak,) = run.leaks.to_dict("records")
    assert (leak["steps"], leak["bytes_per_step"]) == (4, 4 << 20)
    assert leak["stack"].startswith("snapshot.py:38 train")


@pytest.mark.parametrize("by", ["layer", "stack", "step", "allocation", "leak"])
def test_golden_tables(run: Memory, by: Any, golden: Golden, tmp_path: Path) -> None:
    golden(f"memory/run-2.11.{by}.csv", replace(run, by=by).save(tmp_path / "out.csv").read_text())


def test_a_snapshot_of_one_step_and_of_running_out(plain: Path) -> None:
    step = open_snapshot(plain / "step-2.11.pickle").memory()
    assert step.steps["step"].tolist() == [0, 1], "written when step 1 ended"
    oom = open_snapshot(plain / "oom_oom-2.11.pickle").memory()
    assert oom.summary.ooms == (4 << 40,), "a float for each of 1 << 40 numbers"
    assert any("out of memory 1 times" in warning for warning in oom.warnings)


@pytest.mark.parametrize("mode", ["fast", "dladdr", "addr2line"])
def test_no_stack_is_headed_by_the_allocator_or_the_unwinder(mode: str, plain: Path) -> None:
    """C++ frames (``stacks="all"``) in all of PyTorch's ways to name them; what a stack is headed by allocated it."""
    found = open_snapshot(plain / f"cpp-{mode}-2.11.pickle").memory().by_stack
    heads = [str(stack).split(" < ")[0] for stack in found["stack"]]
    assert len(heads) > 8
    for head in heads:
        assert not re.search(r"unwind|allocator|Traceback|gather|c10::Storage|DataPtr|malloc|::empty|^\W*$", head, re.I)
    # the largest blocks: activations of the forward, the workspace of cuBLAS, gradients and states of the optimizer
    assert [head.partition(" ")[2] for head in heads if ".py:" in head][:3] == ["train", "train", "model_of"]
    assert sum("CUDABlasHandle" in head or "setWorkspaceForHandle" in head for head in heads) == 1
