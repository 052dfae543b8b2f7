"""From a node of the backward pass to the operator that made it: any operators, judged one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lane import examples

from nvprof_kit._analysis.attribution.intervals import NONE
from nvprof_kit._analysis.foreign.autograd_links import Operators, envelopes, makers

operators = st.lists(
    st.tuples(
        st.integers(1, 3),  # thread
        st.booleans(),  # a node
        st.integers(-1, 4),  # number
        st.sampled_from([NONE, 1, 2, 3]),  # the thread whose forward made it
    ),
    max_size=24,
)


def laid_out(rows: list[tuple[int, bool, int, int]]) -> Operators:
    """The operators one behind the other, 10 ns each."""
    tid, backward, sequence, forward_tid = (np.array(column) for column in zip(*rows, strict=True))
    start = 100 * np.arange(len(rows))
    ones = np.ones(len(rows), dtype=np.int64)
    return Operators(start, start + 10, ones, tid, backward, backward.copy(), sequence, forward_tid)


def maker_of(rows: list[tuple[int, bool, int, int]], node: int) -> int:
    """The contract, word by word, where no node lies in another."""
    tid, backward, sequence, forward_tid = rows[node]
    if not backward or sequence < 0:
        return NONE
    last = {}
    for index, (thread, is_node, number, _) in enumerate(rows[:node]):
        if not is_node and number == sequence:
            last[thread] = index
    if forward_tid != NONE:
        return last.get(forward_tid, NONE)
    others = [index for thread, index in last.items() if thread != tid]
    if len(others) > 1:
        return NONE
    return others[0] if others else last.get(tid, NONE)


@settings(max_examples=examples(50))
@given(operators.filter(bool))
def test_any_operators(rows: list[tuple[int, bool, int, int]]) -> None:
    assert makers(laid_out(rows)).tolist() == [maker_of(rows, index) for index in range(len(rows))]


OUTER = np.array([NONE, 0, 1, 0, NONE])
"""Four ranges of layers: 0 holds 1 and 3, 1 holds 2; and `NONE` behind the last."""


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(-1, 3)), min_size=1, max_size=20))
def test_envelopes_nest_and_cover_their_nodes(rows: list[tuple[int, int]]) -> None:
    """At each node, the envelopes around it are its layer and the layers around that, from the inside out."""
    found = laid_out([(thread, True, 0, NONE) for thread, _ in rows])
    owner = np.array([layer for _, layer in rows])
    made = envelopes(found, owner, OUTER)
    for node, layer in enumerate(owner.tolist()):
        around = [
            index
            for index in range(len(made.start))
            if made.tid[index] == found.tid[node] and made.start[index] <= found.start[node] < made.end[index]
        ]
        chain, outer = [], layer
        while outer != NONE:
            chain.append(outer)
            outer = int(OUTER[outer])
        assert [int(made.layer_range[index]) for index in around][::-1] == chain
