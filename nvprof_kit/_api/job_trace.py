"""Several captures of a job as one trace, on the job's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._analysis.timeline import Timeline
    from nvprof_kit._api.capture import Capture
    from nvprof_kit._api.job import Job
    from nvprof_kit._report.export.job_trace import RankClock
    from nvprof_kit._results.document import Document
    from nvprof_kit._trace.schema import CaptureInfo

    Reader = Callable[[], tuple[Timeline, CaptureInfo]]


def trace_of_ranks(
    captures: Sequence[Capture],
    job: Job,
    step: int | None,
    form: Literal["pftrace", "json.gz", "json"],
    steps: StepOptions | None = None,
) -> Document:
    """The trace of some ranks' captures, each beside the others on the job's clock.

    Args:
        captures: The captures, of one rank each.
        job: The job that they are of.
        step: Only what ran in this step; None for the whole captures.
        form: Form of the trace.
        steps: Only what ran in these steps; None for the whole captures.

    Raises:
        UsageError: A capture is of no rank of the job, or of several.
    """
    from nvprof_kit._report.export.forms import suffixes_of
    from nvprof_kit._report.export.job_trace import job_trace
    from nvprof_kit._results.document import Document

    clocks = _clocks(job)
    placed: list[tuple[RankClock, Reader]] = []
    for capture in captures:
        ranks = job.ranks[job.ranks["capture"] == str(capture.path)]["rank"].tolist()
        if len(ranks) != 1:
            raise UsageError(f"{capture.path}: holds {len(ranks)} ranks; a trace of several captures needs one of each")
        placed.append((clocks[ranks[0]], _reader(capture, step, steps)))
    placed.sort(key=lambda one: one[0].rank)
    origin = min((clock.offset_ns or 0) - round(clock.drift * clock.at_ns) for clock, _ in placed)
    lost = [clock.rank for clock, _ in placed if clock.offset_ns is None]
    warnings = [f"rank {rank} shares no collective with the others: it stands on a clock of its own" for rank in lost]
    sources = tuple(source for capture in captures for source in capture.sources)
    return Document(lambda: job_trace(placed, origin, form), suffixes_of(form), sources, tuple(warnings))


def _reader(capture: Capture, step: int | None, steps: StepOptions | None) -> Reader:
    def read() -> tuple[Timeline, CaptureInfo]:
        shown = capture._timeline(step, steps)
        capture._forget()  # the trace of many ranks holds one at a time
        return shown

    return read


def _clocks(job: Job) -> dict[int, RankClock]:
    from nvprof_kit._report.export.job_trace import RankClock

    made = {}
    for row in job.clocks().to_frame().to_dict("records"):
        known = str(row["offset_ns"]) not in ("nan", "<NA>", "None")
        told = (int(row["offset_ns"]), float(row["drift_ppm"]) * 1e-6, int(row["at_ns"])) if known else (None,)
        made[int(row["rank"])] = RankClock(int(row["rank"]), *told)
    return made
