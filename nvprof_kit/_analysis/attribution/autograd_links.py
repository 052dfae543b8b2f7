"""From a node of the backward pass back to the operator that made it, and so to its layer.

Autograd numbers what the forward does: the operator that makes a node and the node share a sequence number, which
counts up on each thread for itself. A node's layer is that of the operator. Several operators may bear a number, since
one that makes no node does not count on; the last of them before the node made it.

`AccumulateGrad` adds a gradient to a parameter's and has no number; the engine runs it at once behind the node whose
gradient it adds, so it belongs to that node's layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array, Nesting, inherit, nest

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Operators:
    """Operators that autograd counts, shape ``(n,)`` each, as in `nvprof_kit._trace.schema.OPERATORS`."""

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

    def take(self, which: npt.NDArray[np.intp] | Int64Array) -> Operators:
        """Some of them."""
        return Operators(*(values[which] for values in vars(self).values()))


@dataclass(frozen=True)
class Envelopes:
    """Stretches of the backward pass, shape ``(m,)`` each; an outer one stands before those in it.

    Attributes:
        start, end, pid, tid: Where the stretch is.
        layer_range: The range of the layer's forward whose backward it is.
    """

    start: Int64Array
    end: Int64Array
    pid: Int64Array
    tid: Int64Array
    layer_range: Int64Array


def whole_nodes(operators: Operators) -> Operators:
    """The operators with each node once: the engine's work for it stands for both and bears its number, which a node
    with hooks bears on its own work only.
    """
    nodes = np.flatnonzero(operators.backward)
    around = np.append(nodes, NONE)[_nest(operators, nodes).parent]
    inner = ~operators.engine[nodes] & (around != NONE) & np.append(operators.engine, False)[around]
    giver = nodes[inner & (operators.sequence[nodes] >= 0)]
    taker = around[inner & (operators.sequence[nodes] >= 0)]
    sequence, forward_tid = operators.sequence.copy(), operators.forward_tid.copy()
    sequence[taker], forward_tid[taker] = operators.sequence[giver], operators.forward_tid[giver]
    kept = np.ones(len(operators), dtype=bool)
    kept[nodes[inner]] = False
    return replace(operators, sequence=sequence, forward_tid=forward_tid).take(np.flatnonzero(kept))


def makers(operators: Operators) -> Int64Array:
    """The operator that made each node, as an index of `operators`; `NONE` for what is no node, for a node without a
    number, and where the capture lacks the operator or does not tell which of several threads' it was.

    A node whose forward thread is not known takes the one other thread that has its number. Inside another node (a
    backward pass inside a backward pass, as reentrant checkpointing runs it) its own thread comes first.
    """
    found = np.full(len(operators), NONE, dtype=np.int64)
    nodes = np.flatnonzero(operators.backward & (operators.sequence >= 0))
    forward = np.flatnonzero(~operators.backward & (operators.sequence >= 0))
    told = operators.forward_tid[nodes] != NONE
    found[nodes[told]] = _last_before(operators, forward, nodes[told], operators.forward_tid[nodes[told]])
    unresolved = nodes[~told]
    if len(unresolved):
        found[unresolved] = _makers_on_any_thread(operators, forward, unresolved)
    return found


def _makers_on_any_thread(operators: Operators, forward: Int64Array, nodes: Int64Array) -> Int64Array:
    inside = _nest(operators, nodes).parent != NONE
    own = np.full(len(nodes), NONE, dtype=np.int64)
    other = own.copy()
    hits = np.zeros(len(nodes), dtype=np.int64)
    for thread in np.unique(operators.tid[forward]).tolist():
        mine = forward[operators.tid[forward] == thread]
        found = _last_before(operators, mine, nodes, np.full(len(nodes), thread))
        here = operators.tid[nodes] == thread
        own = np.where(here, found, own)
        other = np.where(~here & (found != NONE), found, other)
        hits += ~here & (found != NONE)
    other[hits > 1] = NONE
    first, second = np.where(inside, own, other), np.where(inside, other, own)
    return np.where((first != NONE) | (hits > 1), first, second)


def _last_before(operators: Operators, forward: Int64Array, nodes: Int64Array, thread: Int64Array) -> Int64Array:
    """The last of the forward operators with each node's number on a thread of its process that began before it."""
    which = np.concatenate([forward, nodes])
    keys = (
        operators.pid[which],
        np.concatenate([operators.tid[forward], thread]),
        operators.sequence[which],
    )
    order = np.lexsort((operators.start[which], *keys[::-1]))
    is_forward = order < len(forward)
    last = np.maximum.accumulate(np.where(is_forward, np.arange(len(order)), NONE)) if len(order) else order
    same = last >= 0
    for key in keys:
        same &= key[order[last]] == key[order]
    found = np.full(len(which), NONE, dtype=np.int64)
    found[order] = np.where(same, which[order[last]], NONE)
    return found[len(forward) :]


def _nest(operators: Operators, which: Int64Array) -> Nesting:
    """How some of the operators, which nest on their thread as calls do, lie in each other."""
    chosen = operators.take(which)
    return nest(chosen.start, chosen.end, chosen.tid)


def layer_of_nodes(operators: Operators, made_by: Int64Array, layers: Nesting, layer_range: Int64Array) -> Int64Array:
    """The range of the layer's forward in which each node was made; `NONE` outside layers.

    Args:
        operators: The operators.
        made_by: What `makers` found.
        layers: The nesting of the capture's ranges.
        layer_range: For each range the nearest layer's range, itself or around it, or `NONE`.
    """
    owner = np.full(len(operators), NONE, dtype=np.int64)
    linked = np.flatnonzero(made_by != NONE)
    at = operators.take(made_by[linked])
    owner[linked] = np.append(layer_range, NONE)[layers.innermost(at.tid, at.start)]
    return owner


def with_followers(operators: Operators, owner: Int64Array) -> Int64Array:
    """The owners with those of the nodes added that have no number: the owner of the node before them.

    Args:
        operators: The operators.
        owner: The owner of each node that has a number, or `NONE`, shape ``(n,)``.
    """
    nodes, group, order = _in_order(operators)
    numbered = operators.sequence[nodes[order]] >= 0
    last = np.maximum.accumulate(np.where(numbered, np.arange(len(order)), NONE)) if len(order) else order
    before = (last >= 0) & (group[order[last]] == group[order])
    whole: Int64Array = owner.copy()
    whole[nodes[order]] = np.where(before, owner[nodes[order[last]]], NONE)
    return whole


def _in_order(operators: Operators) -> tuple[Int64Array, Int64Array, npt.NDArray[np.intp]]:
    """The nodes, for each the group of those that lie on one thread in one node, and their order in groups and time."""
    nodes = np.flatnonzero(operators.backward)
    around = _nest(operators, nodes).parent
    _, thread = np.unique(operators.tid[nodes], return_inverse=True)
    group = thread.astype(np.int64) * (len(nodes) + 1) + around + 1
    return nodes, group, np.lexsort((operators.start[nodes], group))


def envelopes(operators: Operators, owner: Int64Array, outer: Int64Array) -> Envelopes:
    """The backward pass of each layer: stretches in which one node of it runs after another, with those of the layers
    in it inside.

    Args:
        operators: The operators.
        owner: The range of the layer's forward that each node belongs to, or `NONE`, shape ``(n,)``.
        outer: For each range the next layer's range around it, and `NONE` behind the last.
    """
    nodes, group, order = _in_order(operators)
    nodes, group = nodes[order], group[order]
    chain = _chains(owner[nodes], outer)
    begun = np.concatenate(([True], group[1:] != group[:-1])) if len(nodes) else np.zeros(0, dtype=bool)
    parts: list[tuple[Int64Array, Int64Array]] = []
    for level in chain.T:
        begun = begun | np.concatenate(([True], level[1:] != level[:-1]))
        first = np.flatnonzero(begun)
        last = np.append(first[1:], len(level)) - 1
        held = level[first] != NONE
        parts.append((first[held], last[held]))
    if not parts:
        return Envelopes(*(np.empty(0, dtype=np.int64) for _ in range(5)))
    firsts, lasts = (np.concatenate(each) for each in zip(*parts, strict=True))
    levels = np.repeat(np.arange(len(parts)), [len(first) for first, _ in parts])
    begin, end = operators.take(nodes[firsts]), operators.take(nodes[lasts])
    return Envelopes(begin.start, end.end, begin.pid, begin.tid, chain[firsts, levels])


def _chains(innermost: Int64Array, outer: Int64Array) -> Int64Array:
    """For each layer's range those around it from the outermost to itself, `NONE` behind, shape ``(n, levels)``."""
    walk = [innermost]
    while (walk[-1] != NONE).any():
        walk.append(outer[walk[-1]])
    upwards = np.stack(walk[:-1], axis=1) if len(walk) > 1 else np.empty((len(innermost), 0), dtype=np.int64)
    depth = np.count_nonzero(upwards != NONE, axis=1)
    place = depth[:, None] - 1 - np.arange(upwards.shape[1])[None, :]
    turned = np.take_along_axis(upwards, np.maximum(place, 0), axis=1) if upwards.size else upwards
    return np.where(place >= 0, turned, NONE)


def nearest(is_layer: _Bools, nesting: Nesting) -> Int64Array:
    """For each range the nearest layer's range, itself or around it, or `NONE`."""
    return inherit(np.where(is_layer, np.arange(len(is_layer)), NONE), nesting)
