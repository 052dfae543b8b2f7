"""Finds the thread and time of an operation's launching API call and of its CUDA graph node's creation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._trace.frames import few
from nvprof_kit._trace.schema import Trace

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 1 << 18
"""Operations and ids processed at a time, to limit memory."""

_SPARSE = 8
"""Use a lookup table over the id range if it has at most this many entries per id."""


class Launches:
    """API calls, searchable by process and correlation id.

    Args:
        calls: Their table, with the columns pid, tid, correlation and start_ns.

    Attributes:
        tid: Thread of each call, with `NONE` appended so that index `NONE` finds it.
        time: Start of each call in ns, with 0 appended.
    """

    def __init__(self, calls: pd.DataFrame) -> None:
        pid, tid, correlation, start = (calls[name].to_numpy() for name in ("pid", "tid", "correlation", "start_ns"))
        self.tid, self.time = np.append(tid, NONE), np.append(start, 0)
        if len(pid) and pid.min() == pid.max():
            self._of_process = {int(pid[0]): _Ids(correlation, start, None)}
            return
        rows_of_process = {process: np.flatnonzero(pid == process) for process in few(pid).tolist()}
        self._of_process = {
            process: _Ids(correlation[rows], start[rows], rows) for process, rows in rows_of_process.items()
        }

    def that_launched(self, pid: Int64Array, correlation: Int64Array, start: Int64Array) -> Int64Array:
        """The call that launched each operation, `NONE` if the capture lacks it.

        Args:
            pid: Process of each operation, shape ``(n,)``.
            correlation: Correlation id of each, unique within a process and a collection window, shape ``(n,)``.
            start: Start of each in ns, shape ``(n,)``. If several windows reuse an id, the last call before the
                operation launched it.
        """
        call = np.full(len(pid), NONE, dtype=np.int64)
        for low in range(0, len(pid), _BLOCK):
            block = slice(low, low + _BLOCK)
            of_block = call[block]
            for process, ids in self._of_process.items():
                is_of_process = pid[block] == process
                of_block[is_of_process] = ids.rows_of(correlation[block][is_of_process], start[block][is_of_process])
        return call


class _Ids:
    """The correlation ids of one process's calls. CUPTI assigns them sequentially, so a table over their range is
    usually small; otherwise use binary search.
    """

    def __init__(self, ids: Int64Array, starts: Int64Array, rows: Int64Array | None) -> None:
        # rows: the indices of the calls; None if they are 0, 1, 2, …
        self._low, self._high = int(ids.min()), int(ids.max())
        self._rows = None if rows is None else np.append(rows, NONE)
        self._table = _table(ids, self._low, self._high)
        if self._table is None:
            order = np.lexsort((starts, ids))
            self._ids, self._starts = ids[order], starts[order]
            self._rows = np.append(order if rows is None else rows[order], NONE)

    def rows_of(self, ids: Int64Array, times: Int64Array) -> Int64Array:
        if self._table is not None:
            within = (ids >= self._low) & (ids <= self._high)
            looked_up = self._table[np.clip(ids, self._low, self._high) - self._low]
            row = np.where(within, looked_up, NONE).astype(np.int64)
        else:
            first, behind = (np.searchsorted(self._ids, ids, side=side) for side in ("left", "right"))
            row = behind - 1
            while (is_late := (row > first) & (self._starts[np.maximum(row, 0)] > times)).any():
                row = np.where(is_late, row - 1, row)
            row = np.where(behind > first, row, NONE)
        return row if self._rows is None else self._rows[row]


def _table(ids: Int64Array, low: int, high: int) -> npt.NDArray[np.int32] | None:
    """The row of each id from `low` to `high`, `NONE` if there is none; None if ids recur or are too far apart."""
    if high - low > _SPARSE * len(ids) or len(ids) >= np.iinfo(np.int32).max:
        return None
    table = np.full(high - low + 1, NONE, dtype=np.int32)
    for first in range(0, len(ids), _BLOCK):
        block = ids[first : first + _BLOCK]
        table[block - low] = np.arange(first, first + len(block), dtype=np.int32)
    return table if np.count_nonzero(table != NONE) == len(ids) else None


class Creations:
    """The CUDA graph nodes of a capture, searchable by process and node id.

    Attributes:
        tid: Thread of each row of `Trace.graph_nodes`, with `NONE` appended.
        time: Start of each row in ns, with 0 appended.
    """

    def __init__(self, trace: Trace) -> None:
        nodes = trace.graph_nodes
        self.tid = np.append(nodes["tid"].to_numpy(), NONE)
        self.time = np.append(nodes["start_ns"].to_numpy(), 0)
        # the original of each node that was cloned, directly or through other clones, and the row that created each
        pids, ids, originals = (nodes[column].to_numpy().tolist() for column in ("pid", "node", "original"))
        copied_from: dict[tuple[int, int], tuple[int, int]] = {}
        self._created: dict[tuple[int, int], int] = {}
        for row, (pid, node, original) in enumerate(zip(pids, ids, originals, strict=True)):
            if original >= 0:
                copied_from[pid, node] = pid, original
            else:
                self._created.setdefault((pid, node), row)
        self._root: dict[tuple[int, int], tuple[int, int]] = {}
        for key in copied_from:
            root, clones = key, {key}
            while root in copied_from and copied_from[root] not in clones:
                root = copied_from[root]
                clones.add(root)
            self._root[key] = root

    def of(self, pid: Int64Array, node: Int64Array) -> Int64Array:
        """The row of `Trace.graph_nodes` that first created each node, or the node it was cloned from; else `NONE`."""
        rows = np.full(len(node), NONE, dtype=np.int64)
        for process in few(pid).tolist():
            rows_of_process = np.flatnonzero(pid == process)
            nodes, node_of_row = np.unique(node[rows_of_process], return_inverse=True)
            keys = [(process, node_id) for node_id in nodes.tolist()]
            rows[rows_of_process] = np.array(
                [self._created.get(self._root.get(key, key), NONE) for key in keys], dtype=np.int64
            )[node_of_row]
        return rows
