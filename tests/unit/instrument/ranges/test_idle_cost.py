"""A decorated call costs what the bare call costs while nobody listens."""

from __future__ import annotations

import statistics
import timeit

import pytest

from nvprof_kit import layer_range
from nvprof_kit.instrument.ranges import state

ALLOWED = 1.0
"""So much of what a bare call costs may be added: about 0.5, which is 30 to 40 ns where a call is fast."""


def added(bare, decorated, call) -> float:
    """Median of what paired runs of decorated calls take more than bare ones, by what these take."""
    shares = []
    for _ in range(31):
        times = [min(timeit.repeat(lambda f=f: call(f), number=2000, repeat=3)) for f in (bare, decorated)]
        shares.append(times[1] / times[0] - 1)
    return statistics.median(shares)


class Block:
    def bare(self, x, mask=None, *, scale=1.0):
        return x

    decorated = layer_range(bare)


@pytest.mark.flaky(reruns=5, reruns_delay=2)  # another process on the machine is in the measurement
def test_idle_calls_cost_nothing() -> None:
    assert state.backend is None
    block = Block()
    method = added(Block.bare, Block.decorated, lambda f: f(block, 1, scale=2.0))
    function = added(lambda x, y=1: x, layer_range(lambda x, y=1: x), lambda f: f(1))
    print(f"decorated idle: method +{method:.2f} of a bare call, function +{function:.2f}")
    assert method < ALLOWED
    assert function < ALLOWED
