"""Links each autograd node of the backward pass to the forward operator that created it, and so to its layer.

Autograd assigns sequence numbers in the forward pass: an operator that creates a node shares a sequence number with
that node. The counter is per thread. A node belongs to the layer of its operator. Several operators can have the same
number, because an operator that creates no node does not advance the counter; the last of them before the node is the
one that created it.

`AccumulateGrad` accumulates a gradient into a parameter's gradient and has no sequence number. The engine runs it
right after the node that produced the gradient, so it belongs to that node's layer.

Operators are tables with the columns of the schema's ``operators`` but the name, indexed from 0.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, nest


def whole_nodes(operators: pd.DataFrame) -> pd.DataFrame:
    """The operators with each node once: the engine's ``evaluate_function`` event stands for both and gets the sequence
    number, which for a node with hooks is recorded on the node's own event only.
    """
    nodes = operators[operators["backward"]]
    enclosing = _enclosing(nodes)
    is_inner = ~nodes["engine"] & enclosing.isin(nodes.index[nodes["engine"]])
    is_numbered = is_inner & (nodes["sequence"] >= 0)
    numbers = ["sequence", "forward_tid"]
    merged: pd.DataFrame = operators.copy()
    merged.loc[enclosing[is_numbered], numbers] = nodes.loc[is_numbered, numbers].to_numpy()
    return merged.drop(nodes.index[is_inner]).reset_index(drop=True)


def makers(operators: pd.DataFrame) -> Int64Array:
    """The operator that created each node, by its row. `NONE` for operators that are not nodes, for nodes without a
    sequence number, and where the capture lacks the operator or its thread is ambiguous.

    If a node's forward thread is unknown, it is the one other thread that has its number. Inside another node (a nested
    backward pass, as in reentrant checkpointing) the node's own thread is tried first.
    """
    is_numbered = operators["sequence"] >= 0
    forward, nodes = operators[is_numbered & ~operators["backward"]], operators[is_numbered & operators["backward"]]
    is_linked = nodes["forward_tid"] != NONE
    linked, unlinked = nodes[is_linked], nodes[~is_linked]
    maker = pd.Series(NONE, operators.index)
    maker[linked.index] = _last_before(forward, linked.assign(tid=linked["forward_tid"]))
    by_thread = {tid: _last_before(forward, unlinked.assign(tid=tid)) for tid in forward["tid"].unique()}
    candidates = pd.DataFrame(by_thread, index=unlinked.index, dtype=np.int64)
    is_own = candidates.columns.to_numpy() == unlinked["tid"].to_numpy()[:, None]
    on_own = candidates.where(is_own, NONE).max(axis=1)
    elsewhere = candidates.mask(is_own, NONE)
    is_ambiguous = (elsewhere != NONE).sum(axis=1) > 1
    on_other = elsewhere.max(axis=1).mask(is_ambiguous, NONE)
    is_inside = _enclosing(unlinked) != NONE
    first, second = on_own.where(is_inside, on_other), on_other.where(is_inside, on_own)
    maker[unlinked.index] = first.where((first != NONE) | is_ambiguous, second).fillna(NONE)
    return np.asarray(maker, dtype=np.int64)


def _last_before(forward: pd.DataFrame, nodes: pd.DataFrame) -> pd.Series[int]:
    """The last forward operator with each node's number that began before it on the same thread, or `NONE`."""
    keys = ["pid", "tid", "sequence"]
    left, right = (rows[["start_ns", *keys]].sort_values("start_ns", kind="stable") for rows in (nodes, forward))
    right["maker"] = right.index
    joined = pd.merge_asof(left, right, on="start_ns", by=keys).set_axis(left.index)
    return joined["maker"].fillna(NONE).astype(np.int64)


def _enclosing(nodes: pd.DataFrame) -> pd.Series[int]:
    """The row of the innermost of these nodes around each, which nest on their thread as calls do, or `NONE`."""
    nesting = nest(*(nodes[name].to_numpy() for name in ("start_ns", "end_ns", "tid")))
    return pd.Series(np.append(nodes.index, NONE)[nesting.parent], nodes.index)


def with_followers(operators: pd.DataFrame, owner: Int64Array) -> Int64Array:
    """Add owners for the nodes without a sequence number: the owner of the preceding node.

    Args:
        operators: The operators.
        owner: The owner of each node that has a number, or `NONE`, shape ``(n,)``.
    """
    nodes = _in_order(operators)
    of_numbered = pd.Series(owner[nodes.index], nodes.index).where(nodes["sequence"] >= 0)
    owners: Int64Array = owner.copy()
    owners[nodes.index] = of_numbered.groupby(nodes["run"]).ffill().fillna(NONE)
    return owners


def _in_order(operators: pd.DataFrame) -> pd.DataFrame:
    """The nodes by thread, enclosing node and time, with the number of the ``run`` on one thread in one node."""
    nodes = operators[operators["backward"]]
    nodes = nodes.assign(enclosing=_enclosing(nodes))
    nodes["run"] = nodes.groupby(["tid", "enclosing"]).ngroup()
    return nodes.sort_values(["run", "start_ns"], kind="stable")


def envelopes(operators: pd.DataFrame, owner: Int64Array, outer: Int64Array) -> pd.DataFrame:
    """The backward pass of each layer: intervals in which its nodes run one after another. Those of inner layers nest
    inside.

    Args:
        operators: The operators.
        owner: The forward range of the layer that each node belongs to, or `NONE`, shape ``(n,)``.
        outer: For each range, the next enclosing layer range, with `NONE` appended.

    Returns:
        Columns ``start_ns``, ``end_ns``, ``pid``, ``tid``, and ``layer_range``, the forward range of the layer that an
        interval is the backward of; an outer one comes before those inside it.
    """
    nodes = _in_order(operators)
    # each node's layer range and what encloses it, outermost first; padded with NONE behind, (levels, nodes)
    chains = [owner[nodes.index]]
    while (chains[-1] != NONE).any():
        chains.append(outer[chains[-1]])
    inwards = np.array(chains)[::-1]
    levels = np.take_along_axis(inwards, np.argsort(inwards == NONE, axis=0, kind="stable"), axis=0)
    parts = []
    is_first = np.diff(nodes["run"], prepend=-1) != 0
    for level in levels:
        is_first = is_first | (np.diff(level, prepend=NONE - 1) != 0)
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(level)) - 1
        intervals_of_level = nodes[["start_ns", "end_ns", "pid", "tid"]].iloc[first].assign(layer_range=level[first])
        intervals_of_level["end_ns"] = nodes["end_ns"].to_numpy()[last[: len(first)]]
        parts.append(intervals_of_level[intervals_of_level["layer_range"] != NONE])
    return pd.concat(parts, ignore_index=True)
