"""What recording costs: the lengths of the steps, recorded or not, and the time around a window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nvprof_kit._instrument.meters.timers import mark_gpu

_KEPT = 64


class StepClock:
    """Times the steps: with CUDA events if the program uses CUDA, else on the CPU clock.

    The time between two events on one stream is the whole step on the GPU, including idle time, without synchronizing.
    """

    def __init__(self) -> None:
        self._steps: dict[bool, deque[tuple[Any, Any]]] = {True: deque(maxlen=_KEPT), False: deque(maxlen=_KEPT)}
        self._begin: Any = None
        self._recorded = False
        self._first = True

    def begin(self, *, recorded: bool) -> None:
        """Begin a step."""
        self._begin, self._recorded = _now(), recorded

    def end(self) -> None:
        """End the step. The program's first step includes initialization, so it counts only if it is recorded."""
        start, self._begin = self._begin, None
        if start is not None and (self._recorded or not self._first):
            self._steps[self._recorded].append((start, _now()))
        self._first = False

    def skip(self) -> None:
        """Do not count the running step."""
        self._begin = None

    def take(self, *, recorded: bool) -> list[int]:
        """Take the durations in ns of the recorded or the other steps; drops steps that the GPU has not completed."""
        lengths = [_length(start, end) for start, end in self._steps[recorded]]
        self._steps[recorded].clear()
        return [length for length in lengths if length is not None]


def _now() -> Any:
    return mark_gpu() or time.perf_counter_ns()


def _length(start: Any, end: Any) -> int | None:
    if isinstance(start, int) or isinstance(end, int):
        return end - start if type(start) is type(end) else None
    try:
        return round(start.elapsed_time(end) * 1e6) if end.query() else None
    except (RuntimeError, ValueError):  # events on two devices, or a CUDA error
        return None


@dataclass(frozen=True)
class OwnCost:
    """The overhead of one window; times in ns.

    Attributes:
        recorded: Lengths of the recorded steps.
        plain: Lengths of steps that were not recorded, for comparison; may be empty.
        set_up_ns: Profiler setup before the window.
        write_ns: Profiler stop and trace write after the window.
        read_ns: Trace analysis, tables and plots after the write.
    """

    recorded: Sequence[int]
    plain: Sequence[int]
    set_up_ns: int
    write_ns: int
    read_ns: int = 0

    @property
    def ratio(self) -> float | None:
        """Ratio of the median lengths of recorded and plain steps; None without plain steps."""
        if not self.recorded or not self.plain or not median(self.plain):
            return None
        return median(self.recorded) / median(self.plain)

    def __str__(self) -> str:
        once = (
            f"set-up {self.set_up_ns / 1e9:.2f} s, writing {self.write_ns / 1e9:.2f} s, "
            f"reading and drawing {self.read_ns / 1e9:.2f} s"
        )
        recorded, plain = (
            f"{median(lengths) / 1e6:.2f} ms (median of {len(lengths)})" if lengths else ""
            for lengths in (self.recorded, self.plain)
        )
        if not recorded:
            return f"Own cost: {once}"
        beside = ", and no plain step ran to compare it with"
        if self.ratio is not None:
            beside = f", a plain one {plain}: {self.ratio:.3f} times"
        return f"Own cost: a recorded step took {recorded}{beside}; {once}"
