"""What recording cost the program that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class OwnCost:
    """What one window cost; times in ns.

    Attributes:
        recorded: Lengths of the recorded steps.
        plain: Lengths of steps that were not recorded; without one there is nothing to compare with.
        set_up_ns: Making the profiler ready, before the window.
        write_ns: Stopping it and writing the trace, after the window.
        read_ns: Reading the trace, writing tables and drawing curves, after that.
    """

    recorded: Sequence[int]
    plain: Sequence[int]
    set_up_ns: int
    write_ns: int
    read_ns: int = 0

    @property
    def ratio(self) -> float | None:
        """A recorded step's length over a plain one's, by medians; None where there is no plain step."""
        if not self.recorded or not self.plain or not median(self.plain):
            return None
        return median(self.recorded) / median(self.plain)

    def __str__(self) -> str:
        once = (
            f"set-up {self.set_up_ns / 1e9:.2f} s, writing {self.write_ns / 1e9:.2f} s, "
            f"reading and drawing {self.read_ns / 1e9:.2f} s"
        )
        if not self.recorded:
            return f"Own cost: {once}"
        step = f"a recorded step took {median(self.recorded) / 1e6:.2f} ms (median of {len(self.recorded)})"
        if self.ratio is None:
            return f"Own cost: {step}, and no plain step ran to compare it with; {once}"
        plain = f"a plain one {median(self.plain) / 1e6:.2f} ms (median of {len(self.plain)})"
        return f"Own cost: {step}, {plain}: {self.ratio:.3f} times; {once}"
