"""Real captures of two ranks, against an independent computation of who came last and for how long."""

import json
from functools import cache
from pathlib import Path

import pytest
from support import data
from support.brute_force.ranks import Pair, events, late, late_in_both, late_in_traces
from support.cli import run
from support.data import DATA

from nvprof_kit import Job, RankTable, open_job
from nvprof_kit.errors import UsageError

RANKS = DATA / "ranks"
FOLDERS = (RANKS, DATA)
PAIRS = sorted({path.name.split(".rank")[0] for folder in FOLDERS for path in folder.glob("*.rank1-2024.2.sqlite.xz")})
"""All pairs of captures that the repository has."""

FAULTS = {
    job: (int(rank) if rank else None, layer or None, phase or None, cause)
    for line in (RANKS / "planted.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for job, rank, layer, phase, cause in [line.split("\t")]
}
"""The rank, layer, phase and cause of what was planted; see tests/data/ranks/README.md."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for name in PAIRS:
        for rank in (0, 1):
            file = f"{name}.rank{rank}-2024.2.sqlite.xz"
            found = next(place / file for place in FOLDERS if (place / file).exists())
            data.unpacked(found, folder / f"{name}.rank{rank}.sqlite")
    return folder


@cache
def opened(folder: Path, name: str) -> Job:
    return open_job([folder / f"{name}.rank{rank}.sqlite" for rank in (0, 1)])


def compare(job: Job, expected: list[Pair], tolerance: float) -> None:
    rows = job.waits().to_frame()
    assert len(rows) == len(expected)
    for row, one in zip(rows.to_dict("records"), expected, strict=True):  # both by time of arrival
        if one.wait_ns > tolerance:
            assert row["late_rank"] == one.late_rank
            assert row["waiting_rank"] == 1 - one.late_rank
            assert abs(row["wait_ns"] - one.wait_ns) <= tolerance
    total = sum(one.wait_ns for one in expected)
    assert rows["wait_ns"].sum() == pytest.approx(total, abs=tolerance / 2 * len(expected), rel=0.01)


@pytest.mark.parametrize("name", PAIRS)
def test_who_came_last_and_for_how_long(unpacked, name):
    expected = late(*(unpacked / f"{name}.rank{rank}.sqlite" for rank in (0, 1)))
    job = opened(unpacked, name)
    compare(job, expected, tolerance=4 * job.clocks().to_frame()["residual_ns"].max() + 20_000)
    answer = job.answer()  # the unchanged graph, replayed, takes as long
    assert answer.replay_error is not None and answer.replay_error <= 0.02
    assert "A replay without changes gives the measured mean step" in str(answer)


@pytest.mark.parametrize("name", ["ddp-layer", "fsdp-host", "pipeline-layer", "tensor-loader"])
def test_who_came_last_by_the_host_s_clock(name):
    """PyTorch's traces of one host have its clock, to within some 20 µs: the offset is what their starts differ by."""
    traces = [DATA / "ranks" / "kineto" / f"{name}.rank{rank}.json.xz" for rank in (0, 1)]
    job = open_job(traces)
    begins_ns = [1000 * min(event["ts"] for event in events(trace) if "dur" in event) for trace in traces]
    assert abs(job.clocks().to_frame()["offset_ns"][1] - (begins_ns[1] - begins_ns[0])) < 20_000
    compare(job, late_in_traces(*traces), tolerance=50_000)


@pytest.mark.parametrize(
    ("files", "planted"),
    [
        (("ddp-sleep.rank0-2024.2.sqlite", "ddp-sleep.rank1.json.xz"), (0, "model.layers.3.mlp")),
        (("fsdp-host.rank0.json.xz", "fsdp-host.rank1-2024.2.sqlite"), (1, "model.layers.2.self_attn")),
    ],
)
def test_one_rank_under_nsys_and_the_other_recorded(tmp_path, files, planted):
    """Two profilers in one run: each counts its times from its own start."""
    paths = [DATA / "ranks" / "mixed" / name for name in files]
    for number, path in enumerate(paths):
        if path.suffix == ".sqlite":
            paths[number] = data.unpacked(path.with_suffix(".sqlite.xz"), tmp_path / path.name)
    job = open_job(paths)
    assert {tool.split()[0] for tool in job.ranks["tool"]} == {"PyTorch", "nsys"}
    compare(job, late_in_both(*paths), tolerance=20_000)
    verdict = job.verdict
    assert (verdict.rank, verdict.layer, verdict.phase, verdict.cause) == (*planted, "forward", "slow_host")
    error = job.answer().replay_error
    assert error is not None and error <= 0.02


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_planted_fault_is_named(unpacked, name):
    job = opened(unpacked, name)
    verdict, waits = job.verdict, job.waits().to_frame()
    assert (verdict.rank, verdict.layer, verdict.phase, verdict.cause) == FAULTS[name]
    assert (verdict.severity == "none") == (verdict.cause == "none")
    layer = "their hosts launch late in model.layers.1.self_attn forward"
    assert (layer in verdict.sentence) == (verdict.cause == "rotating")
    assert job.charges().to_frame()["wait_ns"].sum() == waits["wait_ns"].sum()
    if name.startswith("ranks-ddp"):  # whose first collective waits for a profiler
        assert waits["cause"][0] == "start_up" and waits["wait_ns"][0] > 50e6


@pytest.mark.slow
def test_the_cost_is_what_the_program_wrote_down(unpacked):
    """The eight matrix products took 11.2 to 11.4 ms by CUDA events, the sleeps 25 ms."""
    assert 10.5e6 < opened(unpacked, "fsdp-backward").verdict.cost_ns_per_step < 12.5e6
    assert 10.5e6 < opened(unpacked, "ddp-optimizer").verdict.cost_ns_per_step < 12.5e6
    assert 15e6 < opened(unpacked, "ranks-ddp-layer").verdict.cost_ns_per_step < 25e6
    charges = opened(unpacked, "tensor-sleep").charges().to_frame()
    there = charges[(charges["layer"] == "model.layers.3.mlp") & (charges["phase"] == "forward")]
    steps = there.groupby("step")["cost_ns"].sum()
    assert all(24e6 < cost < 28e6 for cost in steps), steps


def test_the_json_contract(unpacked, tmp_path):
    file = tmp_path / "ranks.json"
    assert run("ranks", *(unpacked / f"ranks-ddp-layer.rank{rank}.sqlite" for rank in (0, 1)), "-o", file) == 0
    said = json.loads(file.read_text())
    assert (said["schema"], said["version"]) == ("nvprof-kit/ranks", 1)
    assert set(said["verdict"]) == {"rank", "layer", "phase", "cause", "severity", "cost_ns_per_step", "sentence"}
    assert set(said["clocks"][1]) >= {"rank", "offset_ns", "drift_ppm", "residual_ns"}
    keys = {"step", "collective", "waiting_rank", "late_rank", "wait_ns", "cause", "layer", "phase"}
    assert len(said["waits"]) == 40 and all(set(row) >= keys for row in said["waits"])
    assert all(isinstance(row["wait_ns"], int) for row in said["waits"])
    assert {"layer", "phase", "rank", "median_ns"} <= set(said["layers"][0])
    assert sum(row["wait_ns"] for row in said["charges"]) == sum(row["wait_ns"] for row in said["waits"])


@pytest.fixture(scope="module")
def pipeline() -> Job:
    return open_job([RANKS / f"pipeline-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1)])


def test_the_bubble_of_each_stage(pipeline):
    table = pipeline.bubbles().to_frame()
    assert table[["stage", "rank"]].drop_duplicates().to_numpy().tolist() == [[0, 0], [1, 1]]
    assert (table[["busy_ns", "wait_ns", "host_ns", "other_ns"]].sum(axis=1) == table["step_ns"]).all()
    assert (table["bubble_ns"] == table["step_ns"] - table["busy_ns"]).all()
    assert table["ideal_share"].round(3).eq(0.2).all()  # (2 - 1) / (4 + 2 - 1)
    shares = table.groupby("stage")["bubble_share"].median()
    assert shares[0] > 0.7 > 0.2 > shares[1]  # the second stage has eight more products in each micro-batch


def test_the_waiting_for_each_micro_batch(pipeline):
    table = pipeline.micro_batches().to_frame()
    # four messages each way in each of four steps
    assert table.groupby(["stage", "direction"]).size().to_dict() == {(0, "backward"): 16, (1, "forward"): 16}
    assert table["micro_batch"].max() == 3
    first = table[(table["stage"] == 0) & (table["micro_batch"] == 0)]
    assert (first["wait_ns"] > 50e6).all() and (first["transfer_ns"] < 1e6).all()
    assert (table["bubble_ns"] <= table["wait_ns"]).all()


def test_kineto_names_its_groups_and_counts_collectives():
    job = open_job([RANKS / "kineto" / f"tensor-loader.rank{rank}.json.xz" for rank in (0, 1)])
    (group,) = job.groups().to_frame().to_dict("records")
    assert (group["group"], group["name"], group["parallel"]) == ("group 0 [0, 1]", "default_pg", "tensor")


def test_ranks_of_two_tools_are_matched_by_their_streams():
    # not of one run, but of one program: what matters is that ids of one tool do not keep them apart
    job = open_job([RANKS / "kineto/tensor-loader.rank0.json.xz", RANKS / "tensor-loader.rank1-2024.2.sqlite.xz"])
    assert len(job.waits().to_frame()) == 112


def test_every_table_is_a_result(pipeline, tmp_path):
    waits = pipeline.waits()
    assert isinstance(waits, RankTable) and set(waits.columns["ranks-waits"]) == set(waits.to_frame().columns)
    assert "more" in str(waits) and "<" in waits._repr_html_()
    assert waits.save(tmp_path / "waits.png").stat().st_size > 100
    worst = waits.to_frame().nlargest(1, "wait_ns")["collective"].item()
    assert worst in str(waits).splitlines()[2], "the costliest first"
    with pytest.raises(UsageError, match="no plot"):
        pipeline.layers().save(tmp_path / "layers.png")
    answer = pipeline.answer()
    assert set(answer.columns["ranks-bubbles"]) == set(answer.only("bubbles").to_frame().columns)
    assert "Bubbles of the pipeline's stages" in str(pipeline) and "rank 1" in pipeline._repr_html_()
    assert answer.save(tmp_path / "all.json").read_text().startswith('{\n "schema": "nvprof-kit/ranks"')


def test_a_real_job_of_two_dimensions():
    """Tensor parallel over two ranks and FSDP2 over two such pairs, by nsys 2024.2: no communicator is named. The four
    ranks share a GPU, so the ends of one all-reduce move by 0.1 ms, and those of the two groups by 0.4 ms.
    """
    files = sorted((RANKS / "grid").glob("grid-layer.rank*.xz"))
    job = open_job(files)
    groups = job.groups().to_frame()
    assert set(groups["ranks"][groups["parallel"] == "tensor"]) == {"0, 1", "2, 3"}
    assert set(groups["ranks"][groups["parallel"] == "data"]) == {"0, 2", "1, 3"}
    assert len(job.waits().to_frame()) == groups["collectives"].sum() // 2 == 336
    assert (job.clocks().to_frame()["drift_ppm"] == 0).all()
    verdict = job.verdict
    assert (verdict.rank, verdict.layer, verdict.cause) == (3, "model.layers.2.mlp", "more_work")
