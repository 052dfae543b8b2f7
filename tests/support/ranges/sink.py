"""A backend that records ranges, in place of a tool."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.session import Backend
from nvprof_kit.names import Category


class Sink(Backend):
    """Ranges as lines, indented by nesting, per thread; a thread's first line is at depth 0.

    Steps that `annotate_model` infers are left out, as tests of other things have no use for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.ranges: list[Range] = []
        self.threads: dict[str, int] = {}
        self._open = threading.local()
        self.pop = self._pop

    def pusher(self, range_: Range) -> Callable[[], None]:
        return lambda: self._push(range_)

    def open(self, range_: Range, owner: object) -> None:
        if owner is not range_ or range_.category is not Category.STEP:
            super().open(range_, owner)

    def _push(self, range_: Range) -> None:
        depth = self.threads.setdefault(threading.current_thread().name, 0)
        self.threads[threading.current_thread().name] += 1
        self.ranges.append(range_)
        self._open.ranges = [*self.open_ranges(), range_]
        self.lines.append("  " * depth + range_.text)

    def _pop(self) -> None:
        self.threads[threading.current_thread().name] -= 1
        self._open.ranges = self.open_ranges()[:-1]

    def start(self, range_: Range) -> object:
        self.lines.append(f"start {range_.text}")
        return range_

    def end(self, started: Range) -> None:
        self.lines.append(f"end {started.text}")

    def mark(self, range_: Range) -> None:
        self.lines.append(f"mark {range_.text}")

    def open_ranges(self) -> list[Range]:
        """The open ranges of the calling thread, outermost first."""
        return getattr(self._open, "ranges", [])

    def open_count(self) -> int:
        return sum(self.threads.values())
