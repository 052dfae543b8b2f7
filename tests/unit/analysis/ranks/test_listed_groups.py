"""Process groups that the programs' marks list, in jobs whose captures name no communicators."""

from __future__ import annotations

import lzma
import sqlite3
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvprof_kit import open_job
from nvprof_kit._ranks.groups import groups_of, listed_groups, listed_parts

GRID = Path(__file__).parents[3] / "data" / "ranks" / "grid"
MARKS = {
    0: "groups 0 default_pg 0-3; a1 mesh_dp 0,2; b1 mesh_cp 0-1",
    1: "groups 0 default_pg 0-3; a2 mesh_dp 1,3; b1 mesh_cp 0-1",
    2: "groups 0 default_pg 0-3; a1 mesh_dp 0,2; b2 mesh_cp 2-3",
    3: "groups 0 default_pg 0-3; a2 mesh_dp 1,3; b2 mesh_cp 2-3",
}


def ends_of(parts: dict[int, int], apart_ns: int = 0, size: int = -1) -> pd.DataFrame:
    """40 collectives of a stream, which move by 2 µs on the ranks of a part, and by `apart_ns` more between parts."""
    noise = np.random.default_rng(5)
    rows = []
    for place in range(40):
        of = {part: int(noise.integers(0, apart_ns + 1)) for part in sorted(set(parts.values()))}
        for rank, part in parts.items():
            end = 10_000_000 * place + 777_000 * rank + of[part] + int(noise.integers(0, 2_000))
            rows.append(("stream 1", place // 10, place % 10, rank, end, size))
    return pd.DataFrame(rows, columns=["comm", "s", "k", "rank", "end_ns", "size"])


def found(ends: pd.DataFrame) -> list[list[int]]:
    parts = listed_parts(ends, listed_groups(MARKS), ends[["comm", "rank"]].drop_duplicates())
    return sorted(sorted(mine["rank"].tolist()) for _, mine in parts.groupby("part"))


def test_time_chooses_among_the_groups_that_marks_list() -> None:
    assert found(ends_of({0: 0, 1: 0, 2: 1, 3: 1}, 300_000)) == [[0, 1], [2, 3]]
    assert found(ends_of({0: 0, 1: 1, 2: 0, 3: 1}, 300_000)) == [[0, 2], [1, 3]]
    assert found(ends_of(dict.fromkeys(range(4), 0))) == [[0, 1, 2, 3]]


def test_the_size_of_the_communicator_decides_where_it_is_known() -> None:
    assert found(ends_of(dict.fromkeys(range(4), 0), size=4)) == [[0, 1, 2, 3]]
    assert [0, 1, 2, 3] not in found(ends_of({0: 0, 1: 0, 2: 1, 3: 1}, 300_000, size=2))


def test_groups_by_chance_are_not_those_that_marks_list() -> None:
    """Ranks 0 and 3 end together, and are in no group of two: by time alone they would be one."""
    ends = ends_of({0: 0, 1: 1, 2: 2, 3: 0}, 300_000)
    assert found(ends) == [] and groups_of(ends)["part"].nunique() == 3


def test_names_and_neighbours() -> None:
    listed = listed_groups(MARKS)
    assert listed.name_of([0, 2], passes_on=False) == "mesh_dp"
    assert listed.name_of([1, 2], passes_on=False) == "" and listed.name_of([1, 2], passes_on=True) == "default_pg"
    stages = listed_groups(
        {rank: f"groups 0 default_pg 0-3; p{rank % 2} pp {rank % 2},{rank % 2 + 2}" for rank in MARKS}
    )
    assert stages.may_pass(0, 2) and not stages.may_pass(0, 3) and listed.may_pass(0, 9) is True


def test_a_rank_without_a_mark_is_in_the_groups_of_the_others() -> None:
    listed = listed_groups({rank: MARKS[rank] for rank in (0, 1, 3)}, range(4))
    assert {group.name for group in listed.of[2]} == {"0", "a1", "b2"}


@pytest.mark.parametrize(
    ("rank", "text"),
    [(1, "groups 0 default_pg 0-7; a2 mesh_dp 1,3"), (2, "groups 0 default_pg 0-3; b1 mesh_cp 0-1")],
)
def test_marks_that_contradict_each_other_are_left_out(rank: int, text: str) -> None:
    listed = listed_groups(MARKS | {rank: text})
    assert not listed.of and len(listed.warnings) == 1 and "contradict" in listed.warnings[0]


def marked(folder: Path, marks: dict[int, str]) -> list[Path]:
    """The captures of the grid, with marks of their groups."""
    made = []
    for rank in range(4):
        (packed,) = GRID.glob(f"grid-layer.rank{rank}-*.xz")
        path = folder / f"grid.rank{rank}.sqlite"
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        db = sqlite3.connect(path)
        (text_id,) = db.execute("SELECT id FROM StringIds WHERE value LIKE 'rank _ of 4%'").fetchone()
        columns = [row[1] for row in db.execute("PRAGMA table_info(NVTX_EVENTS)") if row[1] not in ("text", "textId")]
        listed = ", ".join(f'"{name}"' for name in columns)
        db.execute(
            f"INSERT INTO NVTX_EVENTS ({listed}, text) SELECT {listed}, ? FROM NVTX_EVENTS WHERE textId = ? LIMIT 1",
            (marks[rank], text_id),
        )
        db.commit()
        db.close()
        made.append(path)
    return made


def test_a_real_job_with_marks(tmp_path: Path) -> None:
    """By their use, the groups of the second dimension would be tensor parallel."""
    job = open_job(marked(tmp_path, MARKS), workers=1)
    groups = job.groups().to_frame()
    assert set(zip(groups["ranks"], groups["name"], groups["parallel"], strict=True)) == {
        ("0, 2", "mesh_dp", "data"),
        ("1, 3", "mesh_dp", "data"),
        ("0, 1", "mesh_cp", "context"),
        ("2, 3", "mesh_cp", "context"),
    }
    assert (job.verdict.rank, job.verdict.layer) == (3, "model.layers.2.mlp")
    assert not [one for one in job.warnings if "contradict" in one]


def test_marks_of_another_job_fall_back_with_one_warning(tmp_path: Path) -> None:
    job = open_job(marked(tmp_path, MARKS | {3: MARKS[0]}), workers=1)
    assert set(job.groups().to_frame()["parallel"]) == {"data", "tensor"}
    assert len([one for one in job.warnings if "contradict" in one]) == 1
