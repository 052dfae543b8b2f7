"""The captures of jobs with a planted fault say which rank they are of."""

from __future__ import annotations

import json
import lzma
import sqlite3
from pathlib import Path

import pytest

from nvprof_kit.names import parse_kineto_name, parse_rank

DATA = Path(__file__).parents[3] / "data" / "ranks"
KINDS = ("ddp", "fsdp", "tensor", "pipeline")


def said_by_nsys(packed: Path, folder: Path) -> set[tuple[str, int]]:
    """Text and payload of the marks that name a rank."""
    path = folder / packed.stem
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        rows = db.execute(
            "SELECT coalesce(event.text, string.value), coalesce(event.int64Value, event.uint64Value, "
            "event.int32Value, event.uint32Value) FROM NVTX_EVENTS event "
            "LEFT JOIN StringIds string ON string.id = event.textId WHERE event.eventType = 34"
        ).fetchall()
    return {(text, payload) for text, payload in rows if parse_rank(text)}


@pytest.mark.parametrize("kind", KINDS)
def test_nsys(kind: str, tmp_path: Path) -> None:
    runs = set()
    for rank in range(2):
        ((text, payload),) = said_by_nsys(DATA / f"{kind}-layer.rank{rank}-2024.2.sqlite.xz", tmp_path)
        name = parse_rank(text)
        assert name is not None and (name.rank, name.world, payload) == (rank, 2, rank)
        runs.add(name.run)
    assert len(runs) == 1 and None not in runs


def test_the_embedded_recorder() -> None:
    runs = set()
    for rank in range(2):
        trace = json.loads(lzma.decompress((DATA / "kineto" / f"ddp-layer.rank{rank}.json.xz").read_bytes()))
        marks = [parse_kineto_name(event["name"]) for event in trace["traceEvents"] if "name" in event]
        (name,) = {parse_rank(text) for text, category in filter(None, marks) if category == "user"}
        assert name is not None and (name.rank, name.world) == (rank, 2)
        runs.add(name.run)
    assert len(runs) == 1 and None not in runs
