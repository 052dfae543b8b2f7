"""What advise says of programs made up by chance; `tests/bench/bench_advise.py` judges it on many."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.brute_force.advise_truth import by_rule, made_up, rules_of
from support.captures.advise_programs import LOOKALIKES, Program
from support.captures.nsys_file import NsysFile

import nvprof_kit

DATA = Path(__file__).parents[3] / "data"


def test_faults_of_made_up_programs_are_found_and_no_others(tmp_path: Path) -> None:
    rules = by_rule(list(made_up(tmp_path, range(20))))
    right, missed, wrong = (sum(column) for column in zip(*rules.values(), strict=True))
    assert right >= 15 and missed <= 1 and wrong <= 1


@pytest.mark.parametrize("lookalike", LOOKALIKES)
def test_a_lookalike_is_silent(tmp_path: Path, lookalike: str) -> None:
    assert rules_of(Program(tmp_path / "run.sqlite", 7, (lookalike,)).write()) == frozenset()


def test_a_symptom_belongs_to_its_cause(tmp_path: Path) -> None:
    """Many small kernels, each launched late: one finding."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 0", 0, 2_000_000, category="step", payload=0)
    file.range_("layers.0", 0, 2_000_000)
    for number in range(100):
        file.kernel(20_000 * number, 20_000 * number + 2_000, launched=(19_000 * number, 19_000 * number + 1_000))
    (finding,) = nvprof_kit.open(file.write()).advise().findings
    assert finding.rule == "launch"
    assert "many small kernels: in layers.0 forward 100 of 100 kernels per step" in finding.evidence


def test_nothing_is_per_step_or_for_training_where_there_is_none(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("layers.0", 0, 2_000_000)
    for number in range(100):
        file.kernel(20_000 * number, 20_000 * number + 2_000, launched=(19_000 * number, 19_000 * number + 1_000))
    findings = nvprof_kit.open(file.write()).advise().findings
    text = " ".join(f"{one.evidence} {one.fix}" for one in findings)
    assert text and "per step" not in text and "optimizer" not in text


def test_the_slowest_rank_comes_first_with_its_own_layer_and_its_waiting_is_no_saving() -> None:
    paths = [DATA / f"ranks/ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in range(2)]
    job = nvprof_kit.open_job(paths, workers=1)
    waiting, late = (nvprof_kit.open(path).advise(job=job).findings for path in paths)
    assert waiting[0].rule == late[0].rule == "slowest-rank"
    assert (waiting[0].layer, waiting[0].confidence) == ("model.layers.2.mlp", "medium")
    assert waiting[0].saves_ns == job.verdict.cost_ns_per_step > 5_000_000
    assert "exposed-collectives" not in {finding.rule for finding in waiting}
    assert "exposed-collectives" in {finding.rule for finding in nvprof_kit.open(paths[0]).advise().findings}
    assert "a layer slower than its peers: model.layers.2.mlp forward" in late[0].evidence
    assert "outlier-layer" not in {finding.rule for finding in late}
