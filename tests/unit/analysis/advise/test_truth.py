"""What advise says of programs made up by chance; `tests/bench/bench_advise.py` judges it on many."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from support.brute_force.advise_truth import by_rule, made_up
from support.captures.advise_programs import FAULTS
from support.data import DATA, unpacked

import nvprof_kit


@pytest.mark.slow
def test_faults_of_made_up_programs_are_found_and_no_others(tmp_path):
    """In these programs each fault is planted at least once, and each call that looks like one and costs nothing."""
    rules = by_rule(list(made_up(tmp_path, range(5, 23))))
    assert rules.keys() == {*FAULTS}
    assert all(right and not missed and not wrong for right, missed, wrong in rules.values()), rules


@pytest.mark.parametrize("steps", [True, False])
def test_a_symptom_belongs_to_its_cause(file, steps):
    """Many small kernels, each launched late: one finding; nothing is per step or for training where there is none."""
    if steps:
        file.range_("step 0", 0, 2_000_000, category="step", payload=0)
    file.range_("layers.0", 0, 2_000_000)
    for number in range(100):
        file.kernel(20_000 * number, 20_000 * number + 2_000, launched=(19_000 * number, 19_000 * number + 1_000))
    (finding,) = nvprof_kit.open(file.write()).advise().findings
    assert finding.rule == "launch"
    assert f"many small kernels: in layers.0 forward 100 of 100 kernels{' per step' * steps}" in finding.evidence
    text = f"{finding.evidence} {finding.fix}"
    assert steps or ("per step" not in text and "optimizer" not in text)


@pytest.mark.slow
def test_the_slowest_rank_comes_first_with_its_own_layer_and_its_waiting_is_no_saving():
    paths = [DATA / f"ranks/ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in range(2)]
    job = nvprof_kit.open_job(paths)
    waiting, late = (nvprof_kit.open(path).advise(job=job).findings for path in paths)
    assert waiting[0].rule == late[0].rule == "slowest-rank"
    assert (waiting[0].layer, waiting[0].confidence) == ("model.layers.2.mlp", "medium")
    assert waiting[0].saves_ns == job.verdict.cost_ns_per_step > 5_000_000
    assert "exposed-collectives" not in {finding.rule for finding in waiting}
    assert "exposed-collectives" in {finding.rule for finding in nvprof_kit.open(paths[0]).advise().findings}
    assert "a layer slower than its peers: model.layers.2.mlp forward" in late[0].evidence
    assert "outlier-layer" not in {finding.rule for finding in late}


LONG = (2048, 2304, 1920, 7168, 2048, 2176, 6144, 1984, 2112, 8192)
"""Tokens of the steps of `lengths`, in eights, as in the program."""


def of_rule(name: str, rule: str) -> nvprof_kit.Finding:
    findings = nvprof_kit.open(DATA / f"{name}-2024.2.sqlite.xz").advise().findings
    (finding,) = [finding for finding in findings if finding.rule == rule]
    return finding


class Plain:
    """A capture, read with nothing but SQL."""

    def __init__(self, folder: Path, name: str) -> None:
        self._db = sqlite3.connect(unpacked(f"{name}-2024.2.sqlite.xz", folder / f"{name}.sqlite"))

    def ranges(self, like: str) -> list[tuple[int, int]]:
        text = "coalesce(text, (SELECT value FROM StringIds WHERE id = textId))"
        return self._db.execute(
            f'SELECT start, "end" FROM NVTX_EVENTS WHERE eventType IN (59, 60) AND {text} LIKE ? ORDER BY start',
            (like,),
        ).fetchall()

    def work(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What the GPU ran for the calls between two moments."""
        found = [
            row
            for kind in ("KERNEL", "MEMCPY", "MEMSET")
            for row in self._db.execute(
                f'SELECT o.start, o."end" FROM CUPTI_ACTIVITY_KIND_{kind} o JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON '
                "o.correlationId = r.correlationId WHERE r.start BETWEEN ? AND ?",
                (begin, end),
            )
        ]
        return sorted(found)


def test_garbage_collection_costs_the_time_in_which_the_gpu_had_nothing_to_do(tmp_path):
    plain = Plain(tmp_path, "garbage")
    every = plain.work(0, 1 << 62)
    collections = plain.ranges("gc%")
    assert len(collections) == 2
    # each begins while the GPU has work, and launches none: it is in the way from the end of that work to its own end
    idle = [end - max(done for began, done in every if began < end) for begin, end in collections]
    finding = of_rule("garbage", "gc")
    assert finding.saves_ns == round(sum(idle) / 10)
    # the program saw its steps 3 and 7 take 308.8 and 303.2 ms where the others take 65 to 72
    assert 44_000_000 < finding.saves_ns < (308_800_000 + 303_200_000 - 2 * 65_000_000) / 10
    assert "2 of 10 steps take more than 1.2 times the median" in finding.evidence  # one cause, one finding


def test_steps_of_longer_batches_are_unequal(tmp_path):
    plain = Plain(tmp_path, "lengths")
    ends = [max(end for _, end in plain.work(*step)) for step in plain.ranges("step%")]
    begin = plain.ranges("step 0")[0][0]
    walls = np.diff([begin, *ends])  # the GPU goes from step to step without a pause
    long = np.array(LONG) > 2 * np.median(LONG)
    middle = np.sort(walls)[4]  # a step's, the lower of the two in the middle
    assert np.array_equal(walls > 1.2 * middle, long)
    finding = of_rule("lengths", "unstable-step")
    lost = (walls - middle)[long].sum()
    assert finding.saves_ns == pytest.approx(lost / 10, rel=0.005)
    assert finding.evidence.startswith("3 of 10 steps") and "most of the excess is computing" in finding.evidence
    assert "length" in finding.fix and "allocations" not in finding.fix
