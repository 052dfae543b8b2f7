"""A trace of several ranks on a common clock, with the GPUs and processes of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._report.export.trace_events import events
from nvprof_kit._report.export.tracks import Int64Array, Part, Process, Slices, Track, slices, tracks
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    from nvprof_kit._analysis.timeline import Timeline

_APART = 100_000
"""Distance between the process numbers of two ranks; ten times as much for tracks."""


@dataclass(frozen=True)
class RankClock:
    """A rank and the conversion of its times to the common clock.

    Attributes:
        rank: The rank.
        offset_ns: Offset to add to its times at `at_ns`; None if unknown, which the trace then says.
        drift: Additional offset per nanosecond after `at_ns`.
        at_ns: Reference time on the rank's clock.
    """

    rank: int
    offset_ns: int | None
    drift: float = 0.0
    at_ns: int = 0

    def __call__(self, times: Int64Array) -> Int64Array:
        """Convert times of the rank to the common clock."""
        moved: Int64Array = times + (self.offset_ns or 0)
        return moved if not self.drift else moved + np.round(self.drift * (times - self.at_ns)).astype(np.int64)

    @property
    def name(self) -> str:
        """Name of the rank's processes."""
        return f"rank {self.rank}" if self.offset_ns is not None else f"rank {self.rank}, on a clock of its own"


def job_trace(
    ranks: Iterable[tuple[RankClock, Callable[[], tuple[Timeline, CaptureInfo]]]], origin: int, file_format: str
) -> Iterator[bytes]:
    """The trace in chunks; each rank is read when needed.

    Args:
        ranks: The ranks in order, each with a function that reads it.
        origin: Time zero on the common clock.
        file_format: ``json`` or ``json.gz``.
    """
    named = list(ranks)
    about = {"ranks": ", ".join(str(clock.rank) for clock, _ in named)}
    parts = (_part(number, clock, read, origin) for number, (clock, read) in enumerate(named))
    return events(parts, about, file_format)


def _part(number: int, clock: RankClock, read: Callable[[], tuple[Timeline, CaptureInfo]], origin: int) -> Part:
    drawn, info = read()
    shift = number * _APART

    def renamed(track: Process | Track) -> Process | Track:
        if isinstance(track, Process):
            return Process(track.pid + shift, track.order + shift, f"{clock.name} · {track.name}")
        return Track(track.pid + shift, track.tid + 10 * shift, track.name)

    def moved(own_slices: Slices) -> Slices:
        start, end = (np.maximum(clock(times), origin) for times in (own_slices.start_ns, own_slices.end_ns))
        return own_slices._replace(
            process=own_slices.process + shift, track=own_slices.track + 10 * shift, start_ns=start, end_ns=end
        )

    return Part(map(renamed, tracks(drawn, info)), slices(drawn, moved, origin))
