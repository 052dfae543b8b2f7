"""Links each autograd node of the backward pass to the forward operator that created it, and so to its layer.

Autograd assigns sequence numbers in the forward pass: an operator that creates a node shares a sequence number with
that node. The counter is per thread. A node belongs to the layer of its operator. Several operators can have the same
number, because an operator that creates no node does not advance the counter; the last of them before the node is the
one that created it.

`AccumulateGrad` accumulates a gradient into a parameter's gradient and has no sequence number. The engine runs it
right after the node that produced the gradient, so it belongs to that node's layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, Nesting, inherit, nest

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Operators:
    """Operators with autograd sequence numbers, shape ``(n,)`` each, as in `nvprof_kit._trace.schema.OPERATORS`."""

    start: Int64Array
    end: Int64Array
    pid: Int64Array
    tid: Int64Array
    backward: _Bools
    engine: _Bools
    sequence: Int64Array
    forward_tid: Int64Array

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: npt.NDArray[np.intp] | Int64Array) -> Operators:
        """Select operators."""
        return Operators(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True)
class Envelopes:
    """Intervals of the backward pass, shape ``(m,)`` each; an outer one comes before those inside it.

    Attributes:
        start, end, pid, tid: Times, process and thread of the interval.
        layer_range: The forward range of the layer that this is the backward of.
    """

    start: Int64Array
    end: Int64Array
    pid: Int64Array
    tid: Int64Array
    layer_range: Int64Array


def whole_nodes(operators: Operators) -> Operators:
    """The operators with each node once: the engine's ``evaluate_function`` event stands for both and gets the sequence
    number, which for a node with hooks is recorded on the node's own event only.
    """
    nodes = np.flatnonzero(operators.backward)
    enclosing = np.append(nodes, NONE)[_nest(operators, nodes).parent]
    inner = ~operators.engine[nodes] & (enclosing != NONE) & np.append(operators.engine, False)[enclosing]
    giver = nodes[inner & (operators.sequence[nodes] >= 0)]
    taker = enclosing[inner & (operators.sequence[nodes] >= 0)]
    sequence, forward_tid = operators.sequence.copy(), operators.forward_tid.copy()
    sequence[taker], forward_tid[taker] = operators.sequence[giver], operators.forward_tid[giver]
    is_kept = np.ones(len(operators), dtype=bool)
    is_kept[nodes[inner]] = False
    return replace(operators, sequence=sequence, forward_tid=forward_tid).take(np.flatnonzero(is_kept))


def makers(operators: Operators) -> Int64Array:
    """The operator that created each node, as an index into `operators`. `NONE` for operators that are not nodes, for
    nodes without a sequence number, and where the capture lacks the operator or its thread is ambiguous.

    If a node's forward thread is unknown, it is the one other thread that has its number. Inside another node (a nested
    backward pass, as in reentrant checkpointing) the node's own thread is tried first.
    """
    maker = np.full(len(operators), NONE, dtype=np.int64)
    nodes = np.flatnonzero(operators.backward & (operators.sequence >= 0))
    forward = np.flatnonzero(~operators.backward & (operators.sequence >= 0))
    linked = operators.forward_tid[nodes] != NONE
    maker[nodes[linked]] = _last_before(operators, forward, nodes[linked], operators.forward_tid[nodes[linked]])
    nodes = nodes[~linked]
    if not len(nodes):
        return maker
    inside = _nest(operators, nodes).parent != NONE
    same_thread, other = (np.full(len(nodes), NONE, dtype=np.int64) for _ in range(2))
    hits = np.zeros(len(nodes), dtype=np.int64)
    for thread in np.unique(operators.tid[forward]).tolist():
        forward_here = forward[operators.tid[forward] == thread]
        candidates = _last_before(operators, forward_here, nodes, np.full(len(nodes), thread))
        here = operators.tid[nodes] == thread
        same_thread = np.where(here, candidates, same_thread)
        other = np.where(~here & (candidates != NONE), candidates, other)
        hits += ~here & (candidates != NONE)
    other[hits > 1] = NONE
    first, second = np.where(inside, same_thread, other), np.where(inside, other, same_thread)
    maker[nodes] = np.where((first != NONE) | (hits > 1), first, second)
    return maker


def _last_before(operators: Operators, forward: Int64Array, nodes: Int64Array, thread: Int64Array) -> Int64Array:
    """The last forward operator with each node's number that began before it on a thread of its process."""
    rows = np.concatenate([forward, nodes])
    keys = (
        operators.pid[rows],
        np.concatenate([operators.tid[forward], thread]),
        operators.sequence[rows],
    )
    order = np.lexsort((operators.start[rows], *keys[::-1]))
    is_forward = order < len(forward)
    last = np.maximum.accumulate(np.where(is_forward, np.arange(len(order)), NONE)) if len(order) else order
    same = last >= 0
    for key in keys:
        same &= key[order[last]] == key[order]
    last_of = np.full(len(rows), NONE, dtype=np.int64)
    last_of[order] = np.where(same, rows[order[last]], NONE)
    return last_of[len(forward) :]


def _nest(operators: Operators, rows: Int64Array) -> Nesting:
    """The nesting of some of the operators, which nest on their thread as calls do."""
    chosen = operators.take(rows)
    return nest(chosen.start, chosen.end, chosen.tid)


def layer_of_nodes(operators: Operators, made_by: Int64Array, layers: Nesting, layer_range: Int64Array) -> Int64Array:
    """The forward range of the layer in which each node was created; `NONE` outside layers.

    Args:
        operators: The operators.
        made_by: The result of `makers`.
        layers: The nesting of the capture's ranges.
        layer_range: For each range, the nearest layer range (itself or an enclosing one), or `NONE`.
    """
    owner = np.full(len(operators), NONE, dtype=np.int64)
    linked = np.flatnonzero(made_by != NONE)
    at = operators.take(made_by[linked])
    owner[linked] = np.append(layer_range, NONE)[layers.innermost(at.tid, at.start)]
    return owner


def with_followers(operators: Operators, owner: Int64Array) -> Int64Array:
    """Add owners for the nodes without a sequence number: the owner of the preceding node.

    Args:
        operators: The operators.
        owner: The owner of each node that has a number, or `NONE`, shape ``(n,)``.
    """
    nodes, group, order = _in_order(operators)
    numbered = operators.sequence[nodes[order]] >= 0
    last = np.maximum.accumulate(np.where(numbered, np.arange(len(order)), NONE)) if len(order) else order
    before = (last >= 0) & (group[order[last]] == group[order])
    owners: Int64Array = owner.copy()
    owners[nodes[order]] = np.where(before, owner[nodes[order[last]]], NONE)
    return owners


def _in_order(operators: Operators) -> tuple[Int64Array, Int64Array, npt.NDArray[np.intp]]:
    """The nodes, a group for each (by thread and enclosing node), and their order by group and time."""
    nodes = np.flatnonzero(operators.backward)
    enclosing = _nest(operators, nodes).parent
    _, thread = np.unique(operators.tid[nodes], return_inverse=True)
    group = thread.astype(np.int64) * (len(nodes) + 1) + enclosing + 1
    return nodes, group, np.lexsort((operators.start[nodes], group))


def envelopes(operators: Operators, owner: Int64Array, outer: Int64Array) -> Envelopes:
    """The backward pass of each layer: intervals in which its nodes run one after another. Those of inner layers nest
    inside.

    Args:
        operators: The operators.
        owner: The forward range of the layer that each node belongs to, or `NONE`, shape ``(n,)``.
        outer: For each range, the next enclosing layer range, with `NONE` appended.
    """
    nodes, group, order = _in_order(operators)
    nodes, group = nodes[order], group[order]
    # each node's layer range and what encloses it, outermost first; padded with NONE, (n, levels)
    walk = [owner[nodes]]
    while (walk[-1] != NONE).any():
        walk.append(outer[walk[-1]])
    upwards = np.stack(walk[:-1], axis=1) if len(walk) > 1 else np.empty((len(nodes), 0), dtype=np.int64)
    position = np.count_nonzero(upwards != NONE, axis=1)[:, None] - 1 - np.arange(upwards.shape[1])[None, :]
    chain = np.take_along_axis(upwards, np.maximum(position, 0), axis=1) if upwards.size else upwards
    chain = np.where(position >= 0, chain, NONE)
    begun = np.concatenate(([True], group[1:] != group[:-1])) if len(nodes) else np.zeros(0, dtype=bool)
    parts: list[tuple[Int64Array, Int64Array]] = []
    for level in chain.T:
        begun = begun | np.concatenate(([True], level[1:] != level[:-1]))
        first = np.flatnonzero(begun)
        last = np.append(first[1:], len(level)) - 1
        is_in_level = level[first] != NONE
        parts.append((first[is_in_level], last[is_in_level]))
    if not parts:
        return Envelopes(*(np.empty(0, dtype=np.int64) for _ in range(5)))
    firsts, lasts = (np.concatenate(each) for each in zip(*parts, strict=True))
    levels = np.repeat(np.arange(len(parts)), [len(first) for first, _ in parts])
    first_operators, end = operators.take(nodes[firsts]), operators.take(nodes[lasts])
    return Envelopes(first_operators.start, end.end, first_operators.pid, first_operators.tid, chain[firsts, levels])


def nearest(is_layer: _Bools, nesting: Nesting) -> Int64Array:
    """For each range, the nearest layer range (itself or an enclosing one), or `NONE`."""
    return inherit(np.where(is_layer, np.arange(len(is_layer)), NONE), nesting)
