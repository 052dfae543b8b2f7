"""Chains of waits: a rank was late in a collective because it had waited in another."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from nvprof_kit._ranks.causes import _resolved

COLUMNS = ["instance", "late_rank", "cause", "layer", "phase", "share"]


def waits(count: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Collectives each of which waited for its own reason by half, and for each of the two before by a quarter."""
    own = [0.5 if number > 1 else 1.0 for number in range(count)]
    direct = pd.DataFrame([(one, one % 4, "host", f"layers.{one % 8}", "forward", own[one]) for one in range(count)])
    chained = [(one, one - back, 0.25) for one in range(2, count) for back in (1, 2)]
    return direct.set_axis(COLUMNS, axis=1), pd.DataFrame(chained, columns=["instance", "of", "share"])


def test_the_shares_are_those_of_the_collectives_before() -> None:
    found = _resolved(*waits(4), np.zeros(4, dtype=np.int64))
    shares = found.pivot_table(index="instance", columns="layer", values="share", aggfunc="sum").fillna(0)
    assert shares.loc[2].tolist() == [0.25, 0.25, 0.5, 0]
    assert shares.loc[3].tolist() == [0.0625, 0.25 + 0.0625, 0.125, 0.5]


def test_chains_that_meet_again_and_again() -> None:
    """One row for each reason: kept as lists, those of a hundred collectives would have more rows than fit in memory,
    as those of interleaved pipelines once had.
    """
    found = _resolved(*waits(3_000), np.zeros(3_000, dtype=np.int64))
    assert not found.duplicated(COLUMNS[:-1]).any() and len(found) <= 3_000 * 8
    assert found.groupby("instance")["share"].sum().to_numpy() == pytest.approx(np.ones(3_000))
