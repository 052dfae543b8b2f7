"""What communicators are for, who a rank's equals are, and the bubbles of a pipeline's stages."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from nvprof_kit import Job, RankTable, open_job
from nvprof_kit._ranks.clocks import align
from nvprof_kit._ranks.groups import named_parallel, used_parallel
from nvprof_kit._ranks.stages import stages_of, with_equals
from nvprof_kit.errors import UsageError

RANKS = Path(__file__).parents[3] / "data" / "ranks"


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("DATA_PARALLEL_GROUP_WITH_CP", "data"), ("mesh_dp_shard", "data"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"), ("EXPERT_MODEL_PARALLEL_GROUP", "expert"), ("mesh_tp", "tensor"),
        ("default_pg", "unknown"), ("", "unknown"),
    ],
)  # fmt: skip
def test_a_group_is_named_by_the_program(name: str, parallel: str) -> None:
    assert named_parallel(name) == parallel


@pytest.mark.parametrize(
    ("uses", "parallel"),
    [
        ([("AllReduce", "forward"), ("AllReduce", "backward")], "tensor"),
        ([("AllReduce", "backward"), ("Broadcast", "forward")], "data"),
        ([("AllGather", "forward"), ("AllGather", "backward"), ("ReduceScatter", "backward")], "data"),
        ([("AllGather", "forward"), ("ReduceScatter", "forward")], "tensor"),
        ([("AllToAll", "forward"), ("AllToAll", "backward")], "expert"),
        ([("SendRecv", "forward"), ("SendRecv", "backward")], "context"),
    ],
)
def test_or_by_what_it_does(uses: list[tuple[str, str]], parallel: str) -> None:
    assert used_parallel(pd.DataFrame(uses, columns=["kind", "phase"]), spans_stages=False) == parallel
    if parallel == "context":
        assert used_parallel(pd.DataFrame(uses, columns=["kind", "phase"]), spans_stages=True) == "pipeline"


def medians(*rows: tuple[int, str, int]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["rank", "layer", "median_ns"])
    return table.assign(phase="forward", idle_ns=0, comm_ns=0, ops=1, steps=3)


def test_ranks_of_a_stage_are_equals() -> None:
    table = medians((0, "layers.0", 10), (1, "layers.0", 12), (2, "layers.1", 30), (3, "layers.1", 34))
    assert stages_of(table) == {0: 0, 1: 0, 2: 1, 3: 1}
    # the median of 10 and 12, and of 30 and 34
    assert with_equals(table)["peers_ns"].tolist() == [11, 11, 32, 32]


def test_a_rank_alone_in_its_stage_is_compared_with_layers_of_its_role() -> None:
    table = medians((0, "layers.0.mlp", 10), (0, "layers.1.mlp", 10), (1, "layers.2.mlp", 10), (1, "layers.3.mlp", 50))
    found = with_equals(table)
    assert found["stage"].tolist() == [0, 0, 1, 1]
    assert found["peers_ns"].tolist() == [10, 10, 10, 10] and set(found["equals"]) == {4}


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


def test_a_pipeline_is_a_group_of_stages(pipeline: Job) -> None:
    (group,) = pipeline.groups().to_frame().to_dict("records")
    assert (group["parallel"], group["size"], group["ranks"]) == ("pipeline", 2, "0, 1")


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
    for suffix in (".csv", ".json", ".md", ".parquet", ".html", ".txt", ".png"):
        assert waits.save(tmp_path / f"waits{suffix}").stat().st_size > 100
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


def test_a_drift_that_no_clock_has_is_not_believed() -> None:
    """Ends that run apart by 0.3 % are not those of the same collectives."""

    def drift(ns: int) -> float:
        rows = [
            (0, 0, place, rank, 1_000_000 * place + rank * ns * place, 1_000, True)
            for place in range(30)
            for rank in (0, 1)
        ]
        ends = pd.DataFrame(rows, columns=["c", "s", "k", "rank", "end_ns", "took_ns", "symmetric"])
        return float(align(ends, [0, 1])["drift_ppm"][1])

    assert drift(3_000) == 0
    assert drift(50) == pytest.approx(-50, abs=0.1)
