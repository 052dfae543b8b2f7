"""Several captures of a job as one trace, on the job's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from nvprof_kit.errors import UsageError
from nvprof_kit.issues import as_issues

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._analysis.timeline import Timeline
    from nvprof_kit._api.capture import Capture
    from nvprof_kit._report.export.trace_events import RankClock
    from nvprof_kit._result.writer import Document
    from nvprof_kit._trace.schema import CaptureInfo

    Reader = Callable[[], tuple[Timeline, CaptureInfo]]


def trace_of_ranks(
    captures: Sequence[Capture],
    ranks: pd.DataFrame,
    clocks: pd.DataFrame,
    step: int | None,
    form: Literal["json.gz", "json"],
    *,
    steps: StepOptions | None = None,
) -> Document:
    """One trace with the captures of several ranks, aligned on the job's clock.

    Args:
        captures: The captures, one per rank.
        ranks: Ranks of the job and their captures.
        clocks: Their clocks.
        step: Include only this step; None for the whole captures.
        form: Format of the trace.
        steps: Include only these steps; None for the whole captures.

    Raises:
        UsageError: A capture does not belong to exactly one rank of the job.
    """
    from nvprof_kit._report.export.trace_events import job_trace, suffixes_of
    from nvprof_kit._result.writer import Document

    by_rank = _clocks(clocks)
    placed: list[tuple[RankClock, Reader]] = []
    for capture in captures:
        its = ranks[ranks["capture"] == str(capture.path)]["rank"].tolist()
        if len(its) != 1:
            raise UsageError(f"{capture.path}: holds {len(its)} ranks; a trace of several captures needs one of each")
        placed.append((by_rank[its[0]], _reader(capture, step, steps)))
    placed.sort(key=lambda one: one[0].rank)
    origin = min((clock.offset_ns or 0) - round(clock.drift * clock.at_ns) for clock, _ in placed)
    unaligned = [clock.rank for clock, _ in placed if clock.offset_ns is None]
    warnings = [
        f"rank {rank} has no collective in common with the others: it keeps its own clock" for rank in unaligned
    ]
    sources = tuple(source for capture in captures for source in capture.sources)
    return Document(lambda: job_trace(placed, origin, form), suffixes_of(form), sources, as_issues("clocks", warnings))


def _reader(capture: Capture, step: int | None, steps: StepOptions | None) -> Reader:
    def read() -> tuple[Timeline, CaptureInfo]:
        from nvprof_kit._analysis.attribution.steps import StepOptions

        timeline = capture._timeline(step, StepOptions.of(steps))
        capture.close()  # keep only one capture in memory at a time
        return timeline

    return read


def _clocks(clocks: pd.DataFrame) -> dict[int, RankClock]:
    from nvprof_kit._report.export.trace_events import RankClock

    clock_of_rank = {}
    for row in clocks.to_dict("records"):
        is_known = str(row["offset_ns"]) not in ("nan", "<NA>", "None")
        clock = (int(row["offset_ns"]), float(row["drift_ppm"]) * 1e-6, int(row["at_ns"])) if is_known else (None,)
        clock_of_rank[int(row["rank"])] = RankClock(int(row["rank"]), *clock)
    return clock_of_rank
