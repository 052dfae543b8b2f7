"""Finds the thread and time of an operation's launching API call and of its CUDA graph node's creation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._trace.schema import Trace

_SPARSE = 8
"""Use a lookup table over the id range if it has at most this many entries per id."""


class Launches:
    """The API calls of a capture, searchable by process and correlation id.

    Attributes:
        tid: Thread of each call, with `NONE` appended so that index `NONE` finds it.
        time: Start of each call in ns, with 0 appended.
    """

    def __init__(self, trace: Trace) -> None:
        self.tid = np.append(trace.api["tid"].to_numpy(), NONE)
        self.time = np.append(trace.api["start_ns"].to_numpy(), 0)
        pid, correlation = trace.api["pid"].to_numpy(), trace.api["correlation"].to_numpy()
        rows = {process: np.flatnonzero(pid == process) for process in np.unique(pid).tolist()}
        self._of_process = {process: _Ids(correlation[mine], self.time[mine], mine) for process, mine in rows.items()}

    def that_launched(self, pid: Int64Array, correlation: Int64Array, start: Int64Array) -> Int64Array:
        """The call (index into `Trace.api`) that launched each operation, `NONE` if the capture lacks it.

        Args:
            pid: Process of each operation, shape ``(n,)``.
            correlation: Correlation id of each, unique within a process and a collection window, shape ``(n,)``.
            start: Start of each in ns, shape ``(n,)``. If several windows reuse an id, the last call before the
                operation launched it.
        """
        call = np.full(len(pid), NONE, dtype=np.int64)
        for process, ids in self._of_process.items():
            mine = pid == process
            if mine.all():
                return ids.rows_of(correlation, start)
            call[mine] = ids.rows_of(correlation[mine], start[mine])
        return call


class _Ids:
    """The correlation ids of one process's calls. CUPTI assigns them sequentially, so a table over their range is
    usually small; otherwise use binary search.
    """

    def __init__(self, ids: Int64Array, starts: Int64Array, rows: Int64Array) -> None:
        self._low, self._high = int(ids.min()), int(ids.max())
        self._table: npt.NDArray[np.int32] | None = None
        if self._high - self._low <= _SPARSE * len(ids) and len(rows) < np.iinfo(np.int32).max:
            here = np.arange(len(ids), dtype=np.int32)
            table = np.full(self._high - self._low + 1, NONE, dtype=np.int32)
            table[ids - self._low] = here
            if np.array_equal(table[ids - self._low], here):  # ids are unique
                self._table = table
        self._rows = np.append(rows, NONE)
        if self._table is None:
            order = np.lexsort((starts, ids))
            self._ids, self._starts, self._rows = ids[order], starts[order], np.append(rows[order], NONE)

    def rows_of(self, wanted: Int64Array, moment: Int64Array) -> Int64Array:
        if self._table is not None:
            within = (wanted >= self._low) & (wanted <= self._high)
            return self._rows[np.where(within, self._table[np.clip(wanted, self._low, self._high) - self._low], NONE)]
        first, behind = (np.searchsorted(self._ids, wanted, side=side) for side in ("left", "right"))
        place = behind - 1
        while (late := (place > first) & (self._starts[np.maximum(place, 0)] > moment)).any():
            place = np.where(late, place - 1, place)
        return self._rows[np.where(behind > first, place, NONE)]


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
        self._root, self._created = _lineage(nodes)

    def of(self, pid: Int64Array, node: Int64Array) -> Int64Array:
        """The row of `Trace.graph_nodes` that first created each node, or the node it was cloned from; else `NONE`."""
        rows = np.full(len(node), NONE, dtype=np.int64)
        for process in np.unique(pid).tolist():
            mine = np.flatnonzero(pid == process)
            nodes, which = np.unique(node[mine], return_inverse=True)
            keys = [(process, one) for one in nodes.tolist()]
            rows[mine] = np.array([self._created.get(self._root.get(key, key), NONE) for key in keys], dtype=np.int64)[
                which
            ]
        return rows


def _lineage(nodes: Any) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[tuple[int, int], int]]:
    """For each node, the original node it was cloned from (directly or through other clones); for each original node,
    the row of its creation.
    """
    pids, ids, originals = (nodes[column].to_numpy().tolist() for column in ("pid", "node", "original"))
    copied_from = {
        (pid, node): (pid, original) for pid, node, original in zip(pids, ids, originals, strict=True) if original >= 0
    }
    created: dict[tuple[int, int], int] = {}
    for row, (pid, node, original) in enumerate(zip(pids, ids, originals, strict=True)):
        if original < 0:
            created.setdefault((pid, node), row)
    roots = {}
    for key in copied_from:
        root, seen = key, {key}
        while root in copied_from and copied_from[root] not in seen:
            root = copied_from[root]
            seen.add(root)
        roots[key] = root
    return roots, created
