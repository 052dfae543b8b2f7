"""A backend that records steps, phases and micro-batches, and layers separately."""

from __future__ import annotations

from collections.abc import Callable

from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.session import Backend
from nvprof_kit.names import LAYER_CATEGORIES


class Outline(Backend):
    """The ranges of one thread's loop: ``outline`` without layers, indented by nesting, and ``layers`` in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, Range]] = []
        self.depth = 0
        self.pop = self._pop

    @property
    def outline(self) -> list[str]:
        return ["  " * depth + one.text for depth, one in self.lines if one.category not in LAYER_CATEGORIES]

    @property
    def layers(self) -> list[str]:
        return [one.text for _, one in self.lines if one.category in LAYER_CATEGORIES]

    def under(self, text: str) -> list[str]:
        """The layers' ranges in the ranges of a text, a phase say."""
        found, depth = [], None
        for at, one in self.lines:
            depth = None if depth is not None and at <= depth else depth
            depth = at if one.text == text else depth
            found += [one.text] if depth is not None and at > depth and one.category in LAYER_CATEGORIES else []
        return found

    def pusher(self, range_: Range) -> Callable[[], None]:
        def push() -> None:
            self.lines.append((self.depth, range_))
            self.depth += 1

        return push

    def _pop(self) -> None:
        self.depth -= 1

    def start(self, range_: Range) -> object:
        return range_

    def end(self, started: Range) -> None:
        pass

    def mark(self, range_: Range) -> None:
        pass
