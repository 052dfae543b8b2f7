"""The effect model against simulated programs whose truth is known: power, and gates that fail without a reason.

`tests/bench/bench_diff.py` is the same with more trials and more cases.
"""

from __future__ import annotations

import numpy as np
import pytest
from bench.bench_diff import FLOOR, LAWS, Program, rates

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
