"""A decorated call does next to nothing of its own while nobody listens; `tests/bench/bench_ranges.py` has the time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import nvprof_kit._instrument.session as session
from nvprof_kit import layer_range


class Block:
    def bare(self, x, mask=None, *, scale=1.0):
        return x

    decorated = layer_range(bare)


def calls(run: Callable[[], object]) -> int:
    """How many functions, of Python and of C, a call enters."""
    seen = []
    sys.setprofile(lambda _frame, event, _argument: seen.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen)


@pytest.mark.parametrize("annotated_before", [False, True])
def test_an_idle_call_enters_the_function_and_its_wrapper_alone(annotated_before: bool, sink) -> None:
    if annotated_before:
        Block().decorated(1)
    session.deactivate()
    block = Block()
    function = layer_range(lambda x, y=1: x)
    try:
        bare = calls(lambda: block.bare(1, scale=2.0))
        assert calls(lambda: block.decorated(1, scale=2.0)) <= bare + 1
        assert calls(lambda: function(1)) <= bare + 1
    finally:
        session.activate(sink)
