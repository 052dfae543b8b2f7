"""Jobs with planted faults and clock errors: every fault is found, and none where there is none."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench import compare_what_if as compare
from support.captures.synthetic_job import KINDS, Fault, SyntheticJob, misjudged, odd_job, play, random_job, write_maps
from support.data import DATA

from nvprof_kit import Job, open_job


def opened(job: SyntheticJob, folder: Path) -> Job:
    write_maps(job, folder, ranks_per_file=job.ranks)
    return open_job(folder)


JOBS = {
    **{kind: random_job(seed) for seed, kind in enumerate(KINDS)},
    # of four steps that count, the second is bad, and what it delayed is still late in the third
    "echo of a bad step": random_job(1119),
    # of three steps the first has the profilers' start; the median of two steps is their mean
    "a bad step of two": SyntheticJob(2, 2, 3, 24, 6, Fault("one_bad_step", 3, step=2, size=1.5), seed=10),
    # nothing names the communicators, whose ranks wait for the same ranks elsewhere, and some collectives are lost
    **{f"groups that end together {seed}": odd_job(seed) for seed in (5009, 5046, 5048)},
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_planted_fault_is_found(job, tmp_path):
    assert misjudged(job, opened(job, tmp_path).verdict) == ""


@pytest.mark.parametrize("sized", [True, False])
def test_a_slow_link_of_two_ranks_is_no_late_host(sized, tmp_path):
    """Ranks 6 and 7 move bytes slowly, and wait a little for each other. Nothing names the communicators; where not
    even their size is known, the other rows are taken for one group, to which a group of two cannot be compared.
    """
    job = replace(odd_job(6137), sized=sized)
    assert not job.named and job.columns == 2
    said = opened(job, tmp_path)
    assert misjudged(job, said.verdict) == ""
    assert said.verdict.rank == (None if sized else 6)
    pairs = [row for row in said.groups().to_frame()["ranks"] if len(row.split(",")) == 2]
    assert ("2, 3" in pairs) == sized and "6, 7" in pairs


def test_a_rank_that_waits_for_a_missing_one_is_no_straggler(tmp_path):
    """Rank 2 shares its row with rank 3 alone, which is slow and was not profiled."""
    job = SyntheticJob(2, 2, 6, 20, fault=Fault("slow_gpu", 3, size=2), missing=(3,), seed=8)
    verdict = opened(job, tmp_path).verdict
    assert (verdict.rank, verdict.cause) == (None, "collective")
    assert "rank 2 holds the others up" in verdict.sentence and "may be missing" in verdict.sentence


@pytest.mark.parametrize(
    ("first", "second"), [("slow_layer", "data_loading"), ("slow_host", "one_bad_step"), ("slow_gpu", "rotating")]
)
def test_of_two_faults_the_costlier_one_is_named(first, second, tmp_path):
    more = (Fault(second, 2, 1, step=4, size=0.5),)
    job = SyntheticJob(3, 3, 6, 20, fault=Fault(first, 7, 3, size=2), more=more, seed=5)
    said = opened(job, tmp_path)
    assert misjudged(job, said.verdict) == ""
    assert said.charges().to_frame()["wait_ns"].sum() == said.waits().to_frame()["wait_ns"].sum()


def test_clocks_are_aligned_through_other_ranks(tmp_path):
    job = SyntheticJob(3, 3, 6, 20, seed=4)
    clocks = opened(job, tmp_path).clocks().to_frame().set_index("rank")
    reference, rate = job.true_clocks[0]
    for rank, (offset, drift) in job.true_clocks.items():
        # the true time of the rank's moment at_ns, on rank 0's clock, is what at_ns and offset_ns add up to
        at = int(clocks.loc[rank, "at_ns"])
        true = (at - offset) / (1 + drift)
        assert at + int(clocks.loc[rank, "offset_ns"]) == pytest.approx(true * (1 + rate) + reference, abs=5_000)


def test_waits_are_those_of_the_true_times(tmp_path):
    job = SyntheticJob(2, 3, 4, 10, fault=Fault("slow_gpu", 4), seed=7)
    said = opened(job, tmp_path)
    # in true time: from each rank's arrival to the last of its row or column
    arrived, expected = play(job).arrived, 0.0
    for place in range(len(arrived)):
        shaped = arrived[place].reshape(2, 3)
        axis = 0 if job.in_column(place % job.per_step) else 1
        expected += float((shaped.max(axis=axis, keepdims=True) - shaped).sum())
    assert said.charges().to_frame()["wait_ns"].sum() == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_many_collectives_are_told_step_by_step(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("nvprof_kit._ranks.waits.MOST", 100)
    job = SyntheticJob(4, 4, 8, 20, fault=Fault(kind, rank=6, layer=2, step=5), seed=1)
    said = opened(job, tmp_path)
    assert misjudged(job, said.verdict) == ""
    assert said.charges().to_frame()["wait_ns"].sum() == said.answer().total_wait_ns


@pytest.mark.parametrize("listed", [True, False])
def test_groups_of_more_ranks_than_are_compared(listed, tmp_path, monkeypatch):
    """With marks, a sample of the ranks decides which groups share a stream; without, nothing is matched wrongly."""
    monkeypatch.setattr("nvprof_kit._ranks.groups.MOST_SEPARATED", 10)
    fault = Fault("slow_gpu", 9, size=2)
    job = SyntheticJob(5, 4, 6, 20, fault=fault, seed=9, named=False, sized=False, listed=listed)
    said = opened(job, tmp_path)
    unmatched = [line for line in said.warnings if "several groups of ranks share one" in line]
    waits = said.waits().to_frame()
    if listed:
        assert not unmatched and misjudged(job, said.verdict) == ""
        groups = said.groups().to_frame()
        assert sorted(groups["name"]) == ["mesh_cp"] * 5 + ["mesh_dp"] * 4
        assert sorted(groups["parallel"]) == ["context"] * 5 + ["data"] * 4  # by their use they would be tensor
        rows = waits[waits["collective"].str.startswith("stream 0") & (waits["late_rank"] == 9)]
        assert set(rows["waiting_rank"]) == {8, 10, 11}
    else:
        assert len(unmatched) == 1 and "annotate_model" in unmatched[0]
        assert said.verdict.rank is None and not len(waits)


def mean_step(job: SyntheticJob) -> float:
    ended = play(job).ended.max(axis=1)[job.per_step - 1 :: job.per_step]
    return float((ended[-1] - ended[0]) / (job.steps - 1))


@pytest.mark.parametrize(
    ("rows", "fault", "seed", "changed"),
    [
        (3, Fault("slow_gpu", 5, 2), 3, "rank 5"),
        (3, Fault("slow_layer", 5, 2), 3, "rank 5 in model.layers.2"),
        (3, Fault("data_loading", 5, 2), 3, "every data loader"),
        (4, Fault("slow_link", 4), 5, "every transfer"),
    ],
)
def test_a_fault_that_is_repaired(rows, fault, seed, changed, tmp_path):
    job = SyntheticJob(rows, 3, 6, 20, fault=fault, seed=seed)
    row = opened(job, tmp_path).what_if().to_frame().set_index("what").loc[changed]
    assert row["replayed_ns"] == pytest.approx(row["measured_ns"], rel=0.02)
    assert row["measured_ns"] == pytest.approx(mean_step(job), rel=0.01)
    # the same job, the same random numbers, and no fault
    assert row["step_ns"] == pytest.approx(mean_step(replace(job, fault=Fault())), rel=0.03)


def test_the_replay_agrees_with_a_published_analysis():
    theirs = json.loads((DATA / "stragglers" / "result-ST.json").read_text())
    found = compare.slowdowns(compare.read(DATA / "stragglers" / "trace-ST.parquet"))
    # the first step only begins the timeline
    measured = np.mean(list(theirs["step_t_base"].values())[1:])
    assert found["measured"] == pytest.approx(measured, rel=0.001)
    assert found["replayed"] == pytest.approx(found["measured"], rel=0.02)
    # theirs are of all 32 steps
    assert found["slowdown"] == pytest.approx(theirs["blocking_slowdown"], rel=0.05)
    stages = {int(stage): value for stage, value in theirs["blocking_decompose_by_stage"].items()}
    assert found["stage"] == pytest.approx(stages, rel=0.05)
    assert max(found["stage"], key=found["stage"].get) == max(stages, key=stages.__getitem__) == 3
