"""What communicators are for, who a rank's equals are, and the bubbles of a pipeline's stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvprof_kit import Job, RankTable, open_job
from nvprof_kit.errors import UsageError

RANKS = Path(__file__).parents[3] / "data" / "ranks"


@pytest.fixture(scope="module")
def pipeline() -> Job:
    return open_job([RANKS / f"pipeline-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1)], workers=1)


def test_the_bubble_of_each_stage(pipeline: Job) -> None:
    table = pipeline.bubbles().to_frame()
    assert table[["stage", "rank"]].drop_duplicates().to_numpy().tolist() == [[0, 0], [1, 1]]
    assert (table[["busy_ns", "wait_ns", "host_ns", "other_ns"]].sum(axis=1) == table["step_ns"]).all()
    assert (table["bubble_ns"] == table["step_ns"] - table["busy_ns"]).all()
    assert table["ideal_share"].round(3).eq(0.2).all()  # (2 - 1) / (4 + 2 - 1)
    shares = table.groupby("stage")["bubble_share"].median()
    assert shares[0] > 0.7 > 0.2 > shares[1]  # the second stage has eight more products in each micro-batch


def test_the_waiting_for_each_micro_batch(pipeline: Job) -> None:
    table = pipeline.micro_batches().to_frame()
    # four messages each way in each of four steps
    assert table.groupby(["stage", "direction"]).size().to_dict() == {(0, "backward"): 16, (1, "forward"): 16}
    assert table["micro_batch"].max() == 3
    first = table[(table["stage"] == 0) & (table["micro_batch"] == 0)]
    assert (first["wait_ns"] > 50e6).all() and (first["transfer_ns"] < 1e6).all()
    assert (table["bubble_ns"] <= table["wait_ns"]).all()


def test_kineto_names_its_groups_and_counts_collectives() -> None:
    job = open_job([RANKS / "kineto" / f"tensor-loader.rank{rank}.json.xz" for rank in (0, 1)], workers=1)
    (group,) = job.groups().to_frame().to_dict("records")
    assert (group["group"], group["name"], group["parallel"]) == ("group 0 [0, 1]", "default_pg", "tensor")


def test_ranks_of_two_tools_are_matched_by_their_streams() -> None:
    # not of one run, but of one program: what matters is that ids of one tool do not keep them apart
    captures = [RANKS / "kineto" / "tensor-loader.rank0.json.xz", RANKS / "tensor-loader.rank1-2024.2.sqlite.xz"]
    job = open_job(captures, workers=1)
    assert len(job.waits().to_frame()) == 112


def test_every_table_is_a_result(pipeline: Job, tmp_path: Path) -> None:
    waits = pipeline.waits()
    assert isinstance(waits, RankTable) and set(waits.columns["ranks-waits"]) == set(waits.to_frame().columns)
    assert "more" in str(waits) and "<" in waits._repr_html_()
    assert pipeline.layers().save(tmp_path / "layers.png").stat().st_size > 100
    with pytest.raises(UsageError, match="no plot"):
        pipeline.clocks().save(tmp_path / "clocks.png")
    answer = pipeline.answer()
    assert set(answer.columns["ranks-bubbles"]) == set(answer.only("bubbles").to_frame().columns)
    assert "Bubbles of the pipeline's stages" in str(pipeline) and "rank 1" in pipeline._repr_html_()
    assert answer.save(tmp_path / "all.json").read_text().startswith('{\n "schema": "nvprof-kit/ranks"')


def test_a_real_job_of_two_dimensions(tmp_path: Path) -> None:
    """Tensor parallel over two ranks and FSDP2 over two such pairs, by nsys 2024.2: no communicator is named. The four
    ranks share a GPU, so the ends of one all-reduce move by 0.1 ms, and those of the two groups by 0.4 ms.
    """
    files = sorted((RANKS / "grid").glob("grid-layer.rank*.xz"))
    job = open_job(files, workers=1)
    groups = job.groups().to_frame()
    assert set(groups["ranks"][groups["parallel"] == "tensor"]) == {"0, 1", "2, 3"}
    assert set(groups["ranks"][groups["parallel"] == "data"]) == {"0, 2", "1, 3"}
    assert len(job.waits().to_frame()) == groups["collectives"].sum() // 2 == 336
    assert (job.clocks().to_frame()["drift_ppm"] == 0).all()
    verdict = job.verdict
    assert (verdict.rank, verdict.layer, verdict.cause) == (3, "model.layers.2.mlp", "more_work")
