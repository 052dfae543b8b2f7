"""The overhead of recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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
        if not self.recorded:
            return f"Own cost: {once}"
        step = f"a recorded step took {median(self.recorded) / 1e6:.2f} ms (median of {len(self.recorded)})"
        if self.ratio is None:
            return f"Own cost: {step}, and no plain step ran to compare it with; {once}"
        plain = f"a plain one {median(self.plain) / 1e6:.2f} ms (median of {len(self.plain)})"
        return f"Own cost: {step}, {plain}: {self.ratio:.3f} times; {once}"
