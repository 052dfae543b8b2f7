"""What the host's threads were doing in the CUDA API, from the table `calls`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from nvprof_kit._analysis.attribution.launches import Launches
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._trace.schema import CALL_KINDS, Trace

WAITS = re.compile(r"Synchronize|^cu(da)?Memcpy(?!.*Async)|^cu(da)?Memset(?!.*Async)", re.IGNORECASE)
"""Calls that return when the device has done something."""

ALLOCATES = re.compile(r"(Malloc|MemAlloc|MemFree|HostAlloc|HostRegister|MemMap|MemCreate|^cudaFree)", re.IGNORECASE)
"""Calls that allocate or free memory."""


class HostCalls:
    """The calls of a capture, by thread and start; shape ``(c + 1,)`` each, a place for `NONE` behind the last.

    Attributes:
        pid, tid, start, end: Of each call; `NONE`, `NONE`, 0 and 0 behind the last.
        overhead, operator: Whether it is the profiler's own, and whether a PyTorch operator.
        names: The distinct names.
        name: Index into `names`, of which the last is ''.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace, frame = trace, trace.calls
        columns: dict[str, Any] = {
            name: np.zeros(0, dtype=np.int64) for name in ("start_ns", "end_ns", "tid", "pid", "kind")
        }
        self._frame = frame
        self.names: list[str] = [""]
        codes = np.zeros(0, dtype=np.int64)
        if frame is not None:
            columns = {name: frame[name].to_numpy() for name in columns}
            self.names = [*map(str, frame["name"].cat.categories), ""]
            codes = frame["name"].cat.codes.to_numpy().astype(np.int64)
        self._rows = np.lexsort((columns["start_ns"], columns["tid"]))
        self._place = np.empty(len(self._rows) + 1, dtype=np.int64)
        self._place[self._rows], self._place[-1] = np.arange(len(self._rows)), NONE
        self.tid = np.append(columns["tid"][self._rows], NONE)
        self.start = np.append(columns["start_ns"][self._rows], 0)
        self.end = np.append(columns["end_ns"][self._rows], 0)
        self.pid = np.append(columns["pid"][self._rows], NONE)
        kind = columns["kind"][self._rows]
        self.overhead = np.append(kind == CALL_KINDS.index("overhead"), False)
        self.operator = np.append(kind == CALL_KINDS.index("operator"), False)
        self.name = np.append(codes[self._rows], len(self.names) - 1)
        api = np.flatnonzero(~(self.overhead | self.operator)[:-1])
        self._threads = np.unique(self.tid[:-1])
        self._origin = int(self.start[:-1].min(initial=0))
        self._span = int(self.end.max(initial=0)) - self._origin + 2
        self._api, self._keys = api, self._key(self.tid[api], self.start[api])

    def _key(self, tid: Int64Array, moment: Int64Array) -> Int64Array:
        place = np.searchsorted(self._threads, tid)
        return place * self._span + np.clip(moment - self._origin, 0, self._span - 1)

    @cached_property
    def of_op(self) -> Int64Array:
        """The call that launched each operation, or `NONE`, shape ``(n,)``."""
        trace = self._trace
        if self._frame is None or not len(self._frame):
            return np.full(len(trace.ops), NONE, dtype=np.int64)
        launches = (self._frame["correlation"] >= 0) & (self._frame["kind"] == CALL_KINDS.index("api"))
        launching = self._frame.loc[launches, ["start_ns", "tid", "pid", "correlation"]]
        ids = {name: trace.ops[name].to_numpy() for name in ("pid", "correlation", "start_ns")}
        found = Launches(replace(trace, api=launching)).that_launched(ids["pid"], ids["correlation"], ids["start_ns"])
        row = np.append(np.flatnonzero(launches.to_numpy()), NONE)[found]
        call: Int64Array = self._place[row]
        return call

    def at(self, tid: Int64Array, moment: Int64Array) -> Int64Array:
        """The API call that is open on a thread at a moment, or `NONE`, shape ``(n,)``."""
        if not len(self._api):
            return np.full(len(tid), NONE, dtype=np.int64)
        index = np.searchsorted(self._keys, self._key(tid, moment), side="right") - 1
        call = np.where(index >= 0, self._api[np.maximum(index, 0)], NONE)
        return np.where((self.tid[call] == tid) & (self.end[call] > moment) & (self.start[call] <= moment), call, NONE)

    def of_process(self, pid: int) -> tuple[Int64Array, Int64Array]:
        """Starts of a process's API calls in ns, ascending, and their threads."""
        mine = self._api[self.pid[self._api] == pid]
        mine = mine[np.argsort(self.start[mine], kind="stable")]
        return self.start[mine], self.tid[mine]

    def is_in(self, kind: re.Pattern[str], tid: Int64Array, moment: Int64Array) -> np.ndarray:
        """Whether a thread is in a call of a kind at a moment, shape ``(n,)``."""
        return self.is_a(kind)[self.at(tid, moment)]

    def is_a(self, kind: re.Pattern[str]) -> np.ndarray:
        """Whether each call is of a kind, shape ``(c + 1,)``."""
        found: np.ndarray = np.array([bool(kind.search(name)) for name in self.names])[self.name]
        found &= ~(self.overhead | self.operator)
        return found

    def name_at(self, tid: Int64Array, moment: Int64Array) -> Any:
        """Name of the API call that is open on a thread at a moment, '' for none, as a categorical column."""
        import pandas as pd

        return pd.Categorical.from_codes(self.name[self.at(tid, moment)], categories=pd.Index(self.names, dtype=object))

    def of(self, kind: re.Pattern[str]) -> Int64Array:
        """Thread, start and end of the calls of a kind, shape ``(3, n)``."""
        return self._stretches(self.is_a(kind)[:-1])

    def overheads(self) -> Int64Array:
        """Thread, start and end of the profiler's overheads, once for every thread of their process."""
        chosen = np.flatnonzero(self.overhead[:-1])
        made = [np.zeros((3, 0), dtype=np.int64)]
        for pid in np.unique(self.pid[chosen]):
            mine = chosen[self.pid[chosen] == pid]
            for tid in np.unique(self.tid[self.pid == pid]):
                made.append(np.stack([np.full(len(mine), tid), self.start[mine], self.end[mine]]))
        return np.concatenate(made, axis=1)

    def _stretches(self, chosen: np.ndarray) -> Int64Array:
        return np.stack([values[:-1][chosen] for values in (self.tid, self.start, self.end)])
