"""Process groups that the programs' marks list, in jobs whose captures name no communicators."""

from __future__ import annotations

import lzma
import sqlite3
from pathlib import Path

from nvprof_kit import open_job

GRID = Path(__file__).parents[3] / "data" / "ranks" / "grid"
MARKS = {
    0: "groups 0 default_pg 0-3; a1 mesh_dp 0,2; b1 mesh_cp 0-1",
    1: "groups 0 default_pg 0-3; a2 mesh_dp 1,3; b1 mesh_cp 0-1",
    2: "groups 0 default_pg 0-3; a1 mesh_dp 0,2; b2 mesh_cp 2-3",
    3: "groups 0 default_pg 0-3; a2 mesh_dp 1,3; b2 mesh_cp 2-3",
}


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
