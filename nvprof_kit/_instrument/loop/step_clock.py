"""Times the steps of a loop, recorded or not, without synchronizing with the GPU."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

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
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _length(start: Any, end: Any) -> int | None:
    if isinstance(start, int) or isinstance(end, int):
        return end - start if isinstance(start, int) and isinstance(end, int) else None
    try:
        return round(start.elapsed_time(end) * 1e6) if end.query() else None
    except (RuntimeError, ValueError):  # events on two devices, or a CUDA error
        return None
