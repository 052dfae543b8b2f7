"""The effect model against simulated programs whose truth is known: power, and gates that fail without a reason.

`tests/bench/bench_diff.py` is the same with more trials and more cases.
"""

from __future__ import annotations

import lzma
import sqlite3
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from bench.bench_diff import FLOOR, LAWS, Program, rates

import nvprof_kit
from nvprof_kit._analysis.diff.effects import effects

TRIALS = 200


@pytest.mark.parametrize("runs", [(1, 1), (3, 2)])
def test_ten_percent_are_found_in_five_steps_with_one_percent_of_noise(runs: tuple[int, int]) -> None:
    told = rates(TRIALS, Program(layers=12), slow=1.1, limit=0.05, runs=runs, seed=1)
    assert told.found >= 0.95
    assert told.fails_slower >= 0.95


@pytest.mark.parametrize(
    ("layers", "limit", "runs"), [(12, 0.1, (1, 1)), (1, 0.05, (1, 1)), (12, 0.05, (3, 2)), (1, 0.05, (2, 2))]
)
def test_gates_on_identical_programs_hold(layers: int, limit: float, runs: tuple[int, int]) -> None:
    told = rates(TRIALS, Program(layers=layers), limit=limit, runs=runs, seed=2)
    assert told.fails_slower + told.fails_undecided <= 0.05


def test_a_step_that_stalled_is_no_change_where_there_are_ten() -> None:
    base, new = 1e6 * np.ones((1, 10)), 1e6 * np.ones((1, 10))
    new[0, 4] = 5e6
    found = effects([base], [new], np.zeros(1, dtype=np.int64), FLOOR)
    # the tenth at either end is left out: of the rest each is 1e6
    assert found.new.tolist() == pytest.approx([1e6])
    assert found.change.tolist() == pytest.approx([0.0])


NEEDS_RUNS = (
    "one step of each run + 10 %",
    "one step of each fifth run + 30 %",
    "a tenth of the rows + 30 % in one step",
    "drift of 6 % within each run",
)
"""Laws under which single runs of five steps stay undecided."""


@pytest.mark.parametrize("law", LAWS)
def test_other_laws_of_noise(law: str) -> None:
    program, runs = Program(layers=12, law=LAWS[law]), (3, 2) if law in NEEDS_RUNS else (1, 1)
    found = rates(40, program, slow=1.1, limit=0.05, runs=runs, seed=4)
    identical = rates(40, program, limit=0.1, runs=runs, seed=5)
    # forty trials: 95 % within their chance error; bench_diff.py has the figures of many
    assert found.found >= 0.9 and found.fails_slower + found.fails_undecided == 1.0
    assert identical.fails_slower == 0 and identical.fails_undecided <= 0.05


def test_one_step_bounds_nothing() -> None:
    found = effects([np.ones((1, 1))], [2 * np.ones((1, 1))], np.zeros(1, dtype=np.int64), FLOOR)
    assert found.p.tolist() == [1.0] and np.isnan(found.at_most).all()


def test_what_base_lacks_has_no_relative_error() -> None:
    found = effects([np.zeros((1, 4))], [np.full((1, 4), 9.0)], np.zeros(1, dtype=np.int64), FLOOR)
    assert np.isnan([*found.change, *found.error, *found.at_most]).all()
    assert found.new.tolist() == [9.0] and found.p[0] < 1e-9


DATA = Path(__file__).parents[3] / "data" / "same"


@cache
def run(number: int) -> nvprof_kit.Capture:
    return nvprof_kit.open(DATA / f"llama{number}-2024.2.sqlite.xz")


def test_no_gate_fails_between_runs_of_one_program() -> None:
    for one, other in (*pairwise(range(10)), (9, 0)):
        compared = run(one).diff(run(other), fail_on=["*:+10%", "phase:backward:+5%", "class:gemm:+5%"])
        assert compared.held
        rows = compared.to_frame()
        # the GPU is idle for two thirds of these steps, so that their length says little
        assert set(rows[rows["level"] == "step"]["verdict"]) == {"undecided"}
        assert set(rows[rows["level"].isin(["phase", "class", "layer"])]["verdict"]) == {"same"}


def slower(path: Path, number: int, layer: str, times: float) -> Path:
    """A run in which all kernels of a layer, forward and backward, take longer by a factor."""
    path.write_bytes(lzma.decompress((DATA / f"llama{number}-2024.2.sqlite.xz").read_bytes()))
    text = "coalesce(n.text, (SELECT value FROM StringIds WHERE id = n.textId))"
    with sqlite3.connect(path) as db:
        db.execute(
            'UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = start + CAST(("end" - start) * ? AS INTEGER) WHERE '
            "correlationId IN (SELECT r.correlationId FROM NVTX_EVENTS n JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON "
            f'r.globalTid = n.globalTid AND r.start BETWEEN n.start AND n."end" WHERE {text} IN (?, ?))',
            (times, layer, f"{layer} backward"),
        )
    db.close()
    return path


def test_a_layer_that_is_a_tenth_slower_is_found(tmp_path: Path) -> None:
    changed = slower(tmp_path / "slower.sqlite", 1, "model.layers.2.mlp", 1.1)
    compared = run(0).diff(changed, fail_on=["*:+5%"])
    assert not compared.held
    rows = compared.to_frame()
    told = rows[(rows["level"] == "layer") & (rows["verdict"] == "slower")]
    assert set(zip(told["layer"], told["phase"], strict=True)) == {
        ("model.layers.2.mlp", "forward"), ("model.layers.2.mlp", "backward")
    }  # fmt: skip
    assert told["change"].between(0.09, 0.11).all()
