"""Layers of captures that others published, against an independent computation: `support.published`.

``NVPROF_KIT_PUBLISHED`` names the folder they are in, which are never committed; modules also on committed traces.
"""

import os
import re
from pathlib import Path
from statistics import median

import pytest
from support.data import DATA
from support.published import blocks_of, module_blocks

import nvprof_kit

FOLDER = Path(os.environ.get("NVPROF_KIT_PUBLISHED", "/nonexistent"))
BEFORE = next(FOLDER.glob("*mfu*before.sqlite.xz"), FOLDER / "none")
"""``tests/fixtures`` of GindaChen/nsys-ai: FSDP under emit_nvtx, two ranks in a report."""
TRACES = [
    *(DATA / "foreign" / f"{name}.json.xz" for name in ("kineto-stack", "kineto-checkpoint")),
    *sorted(FOLDER.glob("*.json.gz")),
]


@pytest.mark.skipif(not BEFORE.exists(), reason="needs NVPROF_KIT_PUBLISHED with mfu_before.sqlite.xz")
def test_the_blocks_of_each_rank(tmp_path):
    (_, first), (_, second) = sorted(blocks_of(BEFORE, tmp_path / "before.sqlite").items())
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


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name)
def test_a_module_has_the_time_of_the_kernels_launched_in_it(trace):
    """Where the layers are from module events; graph replays and compiled models have theirs from elsewhere."""
    expected = {layer: time for layer, time in module_blocks(trace).items() if time}
    rows = nvprof_kit.open(trace).layers(steps="all", fold=False).rows
    forward = rows[rows["phase"] == "forward"].set_index("layer")["gpu_total_ns"]
    if not set(expected) & set(forward.index):
        pytest.skip("its layers are not from module events")
    assert {layer: forward.get(layer, 0) for layer in expected} == pytest.approx(expected, rel=0.03)
