"""Ids in a capture: the distinct ones, and joins of tables by them, of the call that launched each operation and of the
creation of the graph node that it replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

Int64Array = npt.NDArray[np.int64]

NONE = -1
"""Index that stands for no row."""

_BLOCK = 1 << 18
"""Operations processed at a time, to limit memory."""


_SPARSE, _SMALL = 8, 1 << 21
"""A lookup table is used if the range of ids has at most this many entries per id, or four times as many and so few."""


def distinct(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.integer[Any]]]:
    """The sorted distinct ids and the inverse index, as from `numpy.unique`, but without sorting if the ids are dense,
    as string ids are.
    """
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    if low == high:
        return ids[:1], np.broadcast_to(np.int32(0), len(ids))
    if high - low > max(_SPARSE * len(ids), min(4 * _SPARSE * len(ids), _SMALL), 1 << 16):
        import pandas as pd

        code, values = pd.factorize(ids, sort=True)
        return np.asarray(values, dtype=np.int64), code
    is_present, position = np.zeros(high - low + 1, dtype=np.bool_), ids - low if low else ids
    is_present[position] = True
    present_ids = np.flatnonzero(is_present)
    rank_of_id = np.empty(len(is_present), dtype=np.int32)
    rank_of_id[present_ids] = np.arange(len(present_ids), dtype=np.int32)
    return present_ids + low, rank_of_id[position]


def distinct_rows(*columns: npt.NDArray[np.int64]) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.integer[Any]]]:
    """The sorted distinct rows of some columns, and the index of each row into them, as from ``numpy.unique`` with
    ``axis=0``, which sorts whole rows and takes many times as long.
    """
    group: npt.NDArray[np.integer[Any]] = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, code = distinct(column)
        if len(values) > 1:
            group = distinct(group.astype(np.int64) * len(values) + code)[1]
    row = np.empty(int(group.max(initial=-1)) + 1, dtype=np.int64)
    row[group] = np.arange(len(group))
    return [column[row] for column in columns], group


def few(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sorted distinct values of a long column with few of them in long runs, such as process ids."""
    if values.strides == (0,):  # of one value
        return values[:1]
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.unique(np.append(values[:1], values[changes]))


def concatenated(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One column of several, which must not be used any more: the first is extended where it is, without a copy. It
    takes no memory for each row if all of them are of one value and take none.
    """
    filled, size = [column for column in columns if len(column)], sum(map(len, columns))
    if filled and all(column.strides == (0,) and column[0] == filled[0][0] for column in filled):
        return np.broadcast_to(filled[0][0], size)
    dtype = np.result_type(*columns)
    joined = filled[0] if filled and filled[0].flags.owndata and filled[0].dtype == dtype else np.empty(0, dtype)
    low = len(joined)
    joined.resize(size, refcheck=False)
    for column in filled[low > 0 :]:
        joined[low : low + len(column)] = column
        low += len(column)
    return joined


def launching_calls(calls: Mapping[str, Any] | pd.DataFrame, ops: Mapping[str, Any] | pd.DataFrame) -> Int64Array:
    """The row of the call that launched each operation, `NONE` if there is none, shape ``(n,)``.

    Args:
        calls: Columns ``pid``, ``correlation`` and ``start_ns`` of calls.
        ops: The same columns of the operations. A correlation id is unique within a process and a collection window; if
            several windows reuse one, the last call before the operation launched it.
    """
    call_pid, call_id, call_start = (np.asarray(calls[name]) for name in ("pid", "correlation", "start_ns"))
    op_pid, op_id, op_start = (np.asarray(ops[name]) for name in ("pid", "correlation", "start_ns"))
    call = np.full(len(op_pid), NONE, dtype=np.int64)
    for process in few(call_pid).tolist():
        is_of_process = call_pid == process
        rows = None if is_of_process.all() else np.flatnonzero(is_of_process)
        ids, starts = (call_id, call_start) if rows is None else (call_id[rows], call_start[rows])
        is_unique = bool((ids[1:] > ids[:-1]).all())  # they come from a counter, so most captures have them sorted
        if not is_unique:
            order = np.lexsort((starts, ids))
            ids, starts, rows = ids[order], starts[order], order if rows is None else rows[order]
            is_unique = bool((ids[1:] != ids[:-1]).all())
        for block in (slice(low, low + _BLOCK) for low in range(0, len(op_pid), _BLOCK)):
            position = np.searchsorted(ids, op_id[block], side="right") - 1
            while not is_unique:
                is_late = (position > 0) & (starts[position] > op_start[block]) & (ids[position - 1] == op_id[block])
                if not is_late.any():
                    break
                position -= is_late
            is_launched = (position >= 0) & (ids[position] == op_id[block]) & (op_pid[block] == process)
            is_launched &= op_id[block] >= 0
            row = position if rows is None else rows[position]
            call[block] = np.where(is_launched, row, call[block])
    return call


def created_nodes(nodes: pd.DataFrame, ops: pd.DataFrame) -> Int64Array:
    """The row of `graph_nodes` that first created the node that each operation replayed, or the node that it was cloned
    from; `NONE` if there is none, or the operation is no replay, shape ``(n,)``.

    Args:
        nodes: The table ``graph_nodes``.
        ops: The operations.
    """
    pid, node = ops["pid"].to_numpy(), ops["graph_node"].to_numpy()
    replayed = np.flatnonzero(node >= 0)
    if not len(replayed):
        return np.broadcast_to(np.int64(NONE), len(node))
    # the original of each node that was cloned, directly or through other clones, and the row that created each
    original_of: dict[tuple[int, int], tuple[int, int]] = {}
    row_of: dict[tuple[int, int], int] = {}
    columns = (nodes[name].to_numpy().tolist() for name in ("pid", "node", "original"))
    for row, (process, clone, original) in enumerate(zip(*columns, strict=True)):
        if original >= 0:
            original_of[process, clone] = process, original
        else:
            row_of.setdefault((process, clone), row)
    (processes, ids), index = distinct_rows(pid[replayed], node[replayed])
    rows = np.full(len(ids), NONE, dtype=np.int64)
    for position, key in enumerate(zip(processes.tolist(), ids.tolist(), strict=True)):
        clones = [key]
        while (original_key := original_of.get(clones[-1])) is not None and original_key not in clones:
            clones.append(original_key)
        rows[position] = row_of.get(clones[-1], NONE)
    created = np.full(len(node), NONE, dtype=np.int64)
    created[replayed] = rows[index]
    return created
