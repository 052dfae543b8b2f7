"""Columns of one of two ranks' exports that `ranks` maps: named, or without effect on the answer."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest

from fuzz import cases, mutate

DATA = Path(__file__).parents[1] / "data" / "ranks"
VERB = ("ranks", "--workers", "1", "--view", "waits", "--format", "csv")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for rank in (0, 1):
        packed = DATA / f"ddp-gc.rank{rank}-2024.2.sqlite.xz"
        (folder / f"run.rank{rank}.sqlite").write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("table", "column", "way"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "correlationId", "drop"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "streamId", "retype"),
        ("NVTX_EVENTS", "text", "null"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "end", "rename"),
    ],
)
def test_a_column_of_one_rank_is_named_or_has_no_effect(
    table: str, column: str, way: str, pair: Path, tmp_path: Path
) -> None:
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    words = (*VERB, *(str(tmp_path / f"run.rank{rank}.sqlite") for rank in (0, 1)))
    whole = cases.run(words, tmp_path)
    assert (whole.status, whole.broken) == (0, "")
    mutate.change_column(pair / "run.rank1.sqlite", tmp_path / "run.rank1.sqlite", table, column, way)
    assert cases.judged(cases.run(words, tmp_path), whole, (column, table)) == ""
