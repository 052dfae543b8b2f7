"""CUDA API activity of the host threads, from the table `calls`."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.attribution.launches import Launches
from nvprof_kit._trace.schema import CALL_KINDS, Trace

SYNCHRONIZING_COPIES = r"^(cu(da)?|hip)Mem(cpy|set)(?!.*Async)"
"""Copies that return only after the device has completed them, in any API's spelling, such as `hipMemcpyWithStream`."""

WAITS = rf"Synchronize|{SYNCHRONIZING_COPIES}"
"""Calls that return only after the device has completed work."""

LONG_NS = 100_000
"""A function lookup or an asynchronous copy returns immediately; one that takes this long loads code or waits."""


class HostCalls:
    """The calls of a capture, in table order; shape ``(c + 1,)`` each, with an entry for `NONE` appended.

    Attributes:
        tid, start, end: Thread and times of each call; the last entry is `NONE`, 0 and 0.
        overhead, operator, system: Whether it is profiler overhead, a PyTorch operator, or a call of the operating
            system.
        names: The distinct names.
        name: Index into `names`; the last name is ''.
        threads: The threads with calls, and the process of each.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace, frame = trace, trace.calls
        columns: dict[str, Any] = {name: np.zeros(0, dtype=np.int64) for name in ("start_ns", "end_ns", "tid", "pid")}
        kind, codes = np.zeros(0, dtype=np.int8), np.zeros(0, dtype=np.int8)
        self.names: list[str] = [""]
        if frame is not None:
            columns, kind = {name: frame[name].to_numpy() for name in columns}, frame["kind"].to_numpy()
            self.names = [*map(str, frame["name"].cat.categories), ""]
            codes = frame["name"].cat.codes.to_numpy()
        self.tid = np.append(columns["tid"], NONE)
        self.start = np.append(columns["start_ns"], 0)
        self.end = np.append(columns["end_ns"], 0)
        self.overhead = np.append(kind == CALL_KINDS.index("overhead"), False)
        self.operator = np.append(kind == CALL_KINDS.index("operator"), False)
        self.system = np.append(kind == CALL_KINDS.index("system"), False)
        narrow = np.int16 if len(self.names) <= np.iinfo(np.int16).max else np.int32
        self.name = np.append(codes.astype(narrow), narrow(len(self.names) - 1))
        self._pids = columns["pid"]
        self.threads: dict[int, int] = {}
        if frame is not None:
            self.threads = dict(frame[["tid", "pid"]].drop_duplicates("tid").itertuples(index=False, name=None))

    def named(self, pattern: str, calls: Int64Array | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Which calls have a name that matches a regular expression, in any case; all calls by default."""
        matches = np.array([bool(re.search(pattern, name, re.I)) for name in self.names])
        of_calls: npt.NDArray[np.bool_] = matches[self.name[calls]]
        return of_calls

    def pid(self, calls: Int64Array) -> Int64Array:
        """The process of each given call, `NONE` for `NONE`."""
        if not len(self._pids):
            return np.full(len(calls), NONE, dtype=np.int64)
        pids: Int64Array = np.where(calls == NONE, NONE, self._pids[calls])
        return pids

    @cached_property
    def of_op(self) -> Int64Array:
        """The call that launched each operation, or `NONE`, shape ``(n,)``."""
        trace, frame = self._trace, self._trace.calls
        if frame is None or not len(frame):
            return np.full(len(trace.ops), NONE, dtype=np.int64)
        ids = {name: trace.ops[name].to_numpy() for name in ("pid", "correlation", "start_ns")}
        launched = ids["correlation"][ids["correlation"] >= 0]
        launches = np.isin(frame["correlation"].to_numpy(), launched)
        rows = np.flatnonzero(launches & ~(self.overhead | self.operator)[:-1])
        launching = Launches(frame[["pid", "tid", "correlation", "start_ns"]].iloc[rows])
        of_op: Int64Array = np.append(rows, NONE)[launching.that_launched(*ids.values())]
        return of_op

    @cached_property
    def waits(self) -> npt.NDArray[np.bool_]:
        """Calls that return only after the device has completed work: synchronizations, synchronizing copies, and
        asynchronous copies of pageable memory that took `LONG_NS` or more, shape ``(c + 1,)``.
        """
        waits: npt.NDArray[np.bool_] = self.named(WAITS) & ~(self.overhead | self.operator)
        if "host_memory" in self._trace.ops:
            pageable = self.of_op[(self._trace.ops["host_memory"] == "pageable").to_numpy()]
            waits[pageable[(self.end - self.start)[pageable] >= LONG_NS]] = True
            waits[NONE] = False
        return waits

    @cached_property
    def first_launches(self) -> Int64Array:
        """The call that launched each kernel for the first time, by process."""
        ops = self._trace.ops
        if "name" not in ops:
            return np.zeros(0, dtype=np.int64)
        start, pid = ops["start_ns"].to_numpy(), ops["pid"].to_numpy()
        names = len(ops["name"].cat.categories) + 1
        pids, process = np.unique(pid, return_inverse=True)
        key = process * names + ops["name"].cat.codes.to_numpy() + 1
        del process
        earliest = np.full(len(pids) * names, np.iinfo(np.int64).max)
        np.minimum.at(earliest, key, start)
        rows = np.flatnonzero(start == earliest[key])
        rows = rows[np.unique(key[rows], return_index=True)[1]]  # of those that start at once, the first in the table
        calls: Int64Array = self.of_op[rows]
        return calls

    def of_process(self, pid: int, rows: Int64Array) -> Int64Array:
        """A process's API calls among some calls, by start, shape ``(m,)``."""
        calls = rows[(self._pids[rows] == pid) & ~(self.overhead | self.operator | self.system)[rows]]
        ordered: Int64Array = calls[np.argsort(self.start[calls], kind="stable")]
        return ordered
