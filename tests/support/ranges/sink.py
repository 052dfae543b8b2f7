"""Backends that record ranges, in place of a tool."""

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import nvprof_kit._instrument.session as session
from nvprof_kit._instrument.session import Backend, Range
from nvprof_kit.names import LAYER_CATEGORIES, Category


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
        if owner is range_ and range_.category is Category.STEP:
            range_.backend = self  # open, for the loop that infers it
        else:
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


class Outline(Sink):
    """Also the steps that `annotate_model` infers: ``outline`` is without layers, indented; ``layers`` in order."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[int, Range]] = []

    def open(self, range_: Range, owner: object) -> None:
        Backend.open(self, range_, owner)

    def _push(self, range_: Range) -> None:
        self.pushed.append((self.threads.get(threading.current_thread().name, 0), range_))
        super()._push(range_)

    @property
    def outline(self) -> list[str]:
        return ["  " * depth + one.text for depth, one in self.pushed if one.category not in LAYER_CATEGORIES]

    @property
    def layers(self) -> list[str]:
        return [one.text for _, one in self.pushed if one.category in LAYER_CATEGORIES]

    def under(self, text: str) -> list[str]:
        """The layers' ranges in the ranges of a text, a phase say."""
        found, depth = [], None
        for at, one in self.pushed:
            depth = None if depth is not None and at <= depth else depth
            depth = at if one.text == text else depth
            found += [one.text] if depth is not None and at > depth and one.category in LAYER_CATEGORIES else []
        return found


S = TypeVar("S", bound=Sink)


def listening(sink: S) -> Iterator[S]:
    """For a fixture: ranges go to the sink while the test runs; it fails if one is left open."""
    session.activate(sink)
    yield sink
    open_count = sink.open_count()
    session.deactivate()
    assert open_count == 0
    assert session.backend is None
