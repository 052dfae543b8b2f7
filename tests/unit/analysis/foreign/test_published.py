"""Captures that others published, where they are at hand: ``NVPROF_KIT_PUBLISHED`` names the folder they are in.

They are never committed. The expected figures are of an independent computation: `blocks_of`, in SQL and sets.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path
from statistics import median

import pytest

import nvprof_kit

FOLDER = Path(os.environ.get("NVPROF_KIT_PUBLISHED", "/nonexistent"))
BEFORE, AFTER = FOLDER / "mfu_2gpu_before.sqlite", FOLDER / "mfu_2gpu_after.sqlite"
"""``tests/fixtures`` of GindaChen/nsys-ai: FSDP under emit_nvtx, two ranks in a report."""

pytestmark = pytest.mark.skipif(not BEFORE.exists(), reason="needs NVPROF_KIT_PUBLISHED with mfu_2gpu_before.sqlite")
_SIDE = re.compile(r"FSDP::(pre|post)_forward \(([^)]*blocks\.\d+)")


def blocks_of(path: Path) -> dict[int, dict[str, tuple[int, int]]]:
    """GPU time in each whole block, and from its first operation to its last, by process and block, in ns."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        api = {
            (thread >> 24, number): (start, thread)
            for start, thread, number in db.execute(
                "SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
            )
        }
        operations = [
            row
            for kind in ("KERNEL", "MEMCPY", "MEMSET")
            for row in db.execute(f"SELECT start, end, globalPid >> 24, correlationId FROM CUPTI_ACTIVITY_KIND_{kind}")
        ]
        ranges = db.execute(
            "SELECT start, end, globalTid, coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId"
        ).fetchall()
    sides: dict[tuple[int, str], dict[str, tuple[int, int]]] = {}
    for start, end, thread, text in ranges:
        if side := _SIDE.match(text or ""):
            sides.setdefault((thread, side[2]), {})[side[1]] = (start, end)
    blocks: dict[int, dict[str, tuple[int, int]]] = {}
    for (thread, name), side_of in sides.items():
        if len(side_of) == 2:
            first, last = side_of["pre"][0], side_of["post"][1]
            inside = [
                (start, end)
                for start, end, pid, number in operations
                if (call := api.get((pid, number))) and call[1] == thread and first <= call[0] < last
            ]
            wall = max(end for _, end in inside) - min(start for start, _ in inside)
            blocks.setdefault(thread >> 24, {})[name] = (sum(end - start for start, end in inside), wall)
    return blocks


def test_the_blocks_of_each_rank() -> None:
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


@pytest.mark.skipif(not AFTER.exists(), reason="needs NVPROF_KIT_PUBLISHED with mfu_2gpu_after.sqlite")
def test_the_two_are_compared_by_their_blocks() -> None:
    result = nvprof_kit.open(BEFORE).diff(AFTER)
    walls = [
        median(wall for rank in blocks_of(path).values() for _, wall in rank.values()) / 1e6 for path in (BEFORE, AFTER)
    ]
    assert (result.base_steps, result.new_steps) == (32, 28)
    assert f"takes {walls[0]:.2f} → {walls[1]:.2f} ms ({walls[1] / walls[0] - 1:+.0%})" in result.notes[1]
    assert "idle for 57.4 of 598.5 → 104.4 of 598.5 ms" in result.notes[1]
    work = result.rows[(result.rows["level"] == "phase") & (result.rows["phase"] == "forward")].iloc[0]
    assert work["verdict"] == "same" and abs(work["change"]) < 0.01
