"""One late rank, told from ranks that take turns, when few steps are recorded."""

from __future__ import annotations

import pandas as pd
import pytest

from nvprof_kit._ranks.verdict import Evidence, judge

STEP_NS = 50_000_000


def evidence(late: list[dict[int, float]]) -> Evidence:
    """A job of two ranks in which each step's ranks cost the other these milliseconds."""
    charges = [
        {
            "step": step,
            "rank": rank,
            "cause": "host",
            "layer": "model.layers.1",
            "phase": "forward",
            "cost_ns": ms * 1e6,
        }
        for step, costs in enumerate(late)
        for rank, ms in costs.items()
    ]
    steps = [{"step": step, "median_ns": STEP_NS, "ranks": 2, "warm_up": False} for step in range(len(late))]
    layers = pd.DataFrame({"rank": [], "layer": [], "phase": [], "median_ns": [], "peers_ns": []})
    return Evidence(pd.DataFrame(charges), pd.DataFrame(steps), layers, pd.DataFrame(), {0: (0, 1)}, 2)


@pytest.mark.parametrize("steps", [5, 6, 7, 11])
def test_two_ranks_that_take_turns_are_no_single_straggler(steps: int) -> None:
    verdict = judge(evidence([{step % 2: 20.0, 1 - step % 2: 0.1} for step in range(steps)]))
    assert (verdict.rank, verdict.cause) == (None, "rotating")
    assert "their hosts launch late in model.layers.1 forward" in verdict.sentence


def test_a_little_lateness_in_each_step_does_not_hide_the_turns() -> None:
    """As measured with FSDP2 on two GPUs: what a rank loses in one step delays it a little in the next."""
    late = [{0: 4.6, 1: 28.3}, {0: 28.0, 1: 6.7}, {0: 9.9, 1: 25.3}, {0: 30.5, 1: 0.5}, {0: 5.6, 1: 27.4}]
    assert judge(evidence(late)).cause == "rotating"


@pytest.mark.parametrize(
    "late",
    [
        pytest.param([{0: 20.0, 1: 0.1}] * 5, id="in-every-step"),
        pytest.param([{0: 20.0, 1: 0.1}] * 4 + [{0: 0.1, 1: 0.1}], id="in-most-steps"),
        pytest.param([{0: 20.0, 1: 0.1}] * 6 + [{0: 0.1, 1: 60.0}], id="and-one-bad-step-of-the-other"),
        pytest.param([{0: 20.0, 1: 12.0}] * 5, id="and-the-other-a-little"),
    ],
)
def test_one_late_rank_is_the_straggler(late: list[dict[int, float]]) -> None:
    assert judge(evidence(late)).rank == 0
