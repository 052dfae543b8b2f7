"""Captures that others published, where they are at hand: ``NVPROF_KIT_PUBLISHED`` names the folder they are in.

They are never committed. The expected figures are of an independent computation, `support.published`.
"""

import os
import re
from pathlib import Path
from statistics import median

import pytest
from support.published import blocks_of, module_blocks

import nvprof_kit

FOLDER = Path(os.environ.get("NVPROF_KIT_PUBLISHED", "/nonexistent"))
BEFORE, AFTER = (next(FOLDER.glob(f"*mfu*{side}.sqlite*"), FOLDER / "none") for side in ("before", "after"))
"""``tests/fixtures`` of GindaChen/nsys-ai: FSDP under emit_nvtx, two ranks in a report."""

needs_before = pytest.mark.skipif(not BEFORE.exists(), reason="needs NVPROF_KIT_PUBLISHED with mfu_before.sqlite")
TRACES = sorted(FOLDER.glob("*.json.gz"))


@needs_before
def test_the_blocks_of_each_rank():
    (_, first), (_, second) = sorted(blocks_of(BEFORE).items())
    assert [len(first), len(second)] == [16, 16]
    assert [round(sum(gpu for gpu, _ in rank.values()) / 1e6, 2) for rank in (first, second)] == [260.76, 252.59]
    assert [round(median(gpu for gpu, _ in rank.values()) / 1e6, 2) for rank in (first, second)] == [15.98, 15.66]
    assert [round(median(wall for _, wall in rank.values()) / 1e6, 2) for rank in (first, second)] == [16.69, 16.78]
    # and the table of layers adds both ranks up, block by block
    rows = nvprof_kit.open(BEFORE).layers().rows
    total = rows.groupby("layer")["gpu_total_ns"].sum()
    for name in first:
        assert total[name] == first[name][0] + second[name][0]
    of_part = {
        part: total[[layer for layer in total.index if re.fullmatch(rf"blocks\.([3-9]|1[0-8])\.{part}", layer)]].sum()
        for part in ("FlashAttnFunc", "linear", "AllToAll4D")
    }
    per_block = {part: int(ns) / 32 / 1e6 for part, ns in of_part.items()}
    assert per_block == pytest.approx({"FlashAttnFunc": 8.02, "linear": 1.71, "AllToAll4D": 1.49}, rel=0.01)


@pytest.mark.skipif(not TRACES, reason="needs NVPROF_KIT_PUBLISHED with PyTorch traces")
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name)
def test_the_modules_of_a_trace_have_the_time_of_the_kernels_launched_in_them(trace):
    """Where the layers are from module events; graph replays and compiled models have theirs from elsewhere."""
    expected = {layer: time for layer, time in module_blocks(trace).items() if time}
    rows = nvprof_kit.open(trace).layers(steps="all", fold=False).rows
    forward = rows[rows["phase"] == "forward"].set_index("layer")["gpu_total_ns"]
    if not set(expected) & set(forward.index):
        pytest.skip("its layers are not from module events")
    assert {layer: forward.get(layer, 0) for layer in expected} == pytest.approx(expected, rel=0.03)


@pytest.mark.skipif(not AFTER.exists(), reason="needs NVPROF_KIT_PUBLISHED with mfu_after.sqlite")
def test_the_two_are_compared_by_their_blocks():
    result = nvprof_kit.open(BEFORE).diff(AFTER)
    walls = [
        median(wall for rank in blocks_of(path).values() for _, wall in rank.values()) / 1e6 for path in (BEFORE, AFTER)
    ]
    assert (result.base_steps, result.new_steps) == (32, 28)
    assert f"takes {walls[0]:.2f} → {walls[1]:.2f} ms ({walls[1] / walls[0] - 1:+.0%})" in result.notes[1]
    assert "idle for 57.4 of 598.5 → 104.4 of 598.5 ms" in result.notes[1]
    work = result.rows[(result.rows["level"] == "phase") & (result.rows["phase"] == "forward")].iloc[0]
    assert work["verdict"] == "same" and abs(work["change"]) < 0.01
