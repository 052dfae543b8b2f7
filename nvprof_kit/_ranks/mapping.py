"""Builds the map of one rank from its capture: collectives, device activity between them, layers and steps.

Host delays beyond those in idle gaps are mapped too: data loading, garbage collection, code loading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute, op_owners
from nvprof_kit._analysis.attribution.intervals import NONE, Cover, Int64Array, exact_sums, sums_by
from nvprof_kit._analysis.attribution.steps import Windows, choose_steps, step_windows
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, IDLE, Gaps, op_sorts
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.idle import idle as idle_causes
from nvprof_kit._analysis.kernels.classes import classify
from nvprof_kit._ranks.communication import PASSING, communications
from nvprof_kit._ranks.lane import IdleGaps, Lane, idle_gaps, lane_of, latest
from nvprof_kit._trace.jobs.schema import TABLES, RankMap
from nvprof_kit._trace.schema import BUSY_CALLS, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import Category

if TYPE_CHECKING:
    import pandas as pd


OPTIONAL = ("name", "stream", "calls", BUSY_CALLS, "collectives", "marks", "loads")
"""What `nvprof_kit._trace.open.open_capture` must read."""

DOING = {COMPUTE: "compute", COMM: "communication", COPY: "copy"}


@dataclass(frozen=True)
class _Parts:
    """Inputs for the tables, all for one device."""

    trace: Trace
    attribution: Attribution
    windows: Windows
    device: int
    rows: Int64Array
    sort: npt.NDArray[np.int8]
    launch: Int64Array
    layer: Any
    phase: Any
    step: Int64Array

    @property
    def instances(self) -> Int64Array:
        """The step instances of the device, in the order of its windows."""
        selected = (self.windows.device == self.device) & self.windows.in_step
        instances: Int64Array = self.windows.instance[selected]
        return instances


class _Names(NamedTuple):
    """The sorted distinct names of operations (or states) and gaps, and the codes of both."""

    names: npt.NDArray[Any]
    of_op: npt.NDArray[np.int32]
    of_gap: npt.NDArray[np.int32]

    def codes(self, op: npt.NDArray[np.integer[Any]], rows: Int64Array, gap: Int64Array) -> npt.NDArray[np.int32]:
        """The codes of pieces: of their operations `op`; for those in `rows` of their gaps `gap`."""
        codes: npt.NDArray[np.int32] = self.of_op[op]
        codes[rows] = self.of_gap[gap]
        return codes


def map_rank(trace: Trace, rank: int, facts: dict[str, Any], pid: int | None = None) -> RankMap:
    """Condense a capture to a rank's map.

    Args:
        trace: The capture, opened with `OPTIONAL`.
        rank: The rank.
        facts: The other columns of the schema's table ``ranks``.
        pid: The rank's process if the capture has several ranks; None for all.

    Raises:
        CaptureError: The rank ran no GPU operations.
    """
    import pandas as pd

    if not len(trace.ops):
        raise CaptureError(f"{trace.info.path}: no operation ran on a GPU; ranks are compared by what their GPUs did")
    host = HostCalls(trace)
    attribution = attribute(trace)
    windows = step_windows(trace, attribution)
    numbers = _numbers(attribution.ranges.steps)
    windows = replace(windows, step=np.where(windows.in_step, np.append(numbers, 0)[windows.instance], 0))
    parts = _parts(trace, attribution, windows, sort=op_sorts(trace, classify(trace.ops)), host=host, pid=pid)
    start, end = (trace.ops[name].to_numpy()[parts.rows] for name in ("start_ns", "end_ns"))
    idle = _idle(parts, start, end)
    device_windows = np.flatnonzero(windows.device == parts.device)
    window = device_windows[np.searchsorted(windows.start[device_windows], idle.start, side="right") - 1]
    gaps = idle_causes(trace, attribution, windows, Gaps(window, idle.start, idle.end), host).gaps
    comm = communications(trace, host, parts.rows, parts.sort == COMM, launch=parts.launch, step=parts.step, rank=rank)
    ready, gates = _ready(parts, comm.ops, start, end, host), _gates(parts, comm.ops, start, end)
    cuts = np.unique(np.concatenate((ready, end[comm.ops][gates], windows.start, windows.end)))
    cuts = cuts[(cuts >= start.min()) & (cuts <= end.max())]
    is_shown = choose_steps(trace, attribution).shown[parts.instances]
    process = windows.devices[parts.device].pid
    pauses = collecting(trace, process)
    gaps = with_host_causes(gaps, {"gc": pauses, "warm_up": loading_code(trace)})
    segments = _segments(
        parts, lane_of(start, end, parts.sort, cuts), idle, gaps=gaps, collectives=comm.ops, start=start
    )
    steps = _steps(parts, rank).assign(**host_times(attribution, process, pauses, parts.instances))
    steps["warm_up"] = ~is_shown
    of_collective = segments.loc[segments["collective"] >= 0, ["collective", "ns"]]
    collectives = comm.table.assign(
        rank=rank,
        start_ns=start[comm.ops],
        end_ns=end[comm.ops],
        alone_ns=exact_sums(of_collective["collective"], of_collective["ns"], len(comm.ops)),
        ready_ns=ready,
        ready_segment=np.searchsorted(cuts, ready, side="right") - 1,
        end_segment=np.searchsorted(cuts, end[comm.ops], side="right") - 1,
        gates=gates,
        layer=np.asarray(parts.layer[comm.ops]),
        phase=np.asarray(parts.phase[comm.ops]),
    )
    # how the collectives are identified: by communicator ids, by sequence numbers; messages are matched by order
    named = ~comm.table["comm"].str.startswith("stream ")
    numbered = (comm.table["sequence"] >= 0)[named & ~comm.table["comm"].str.contains(PASSING, regex=True)]
    identified = {"named": bool(named.any()), "numbered": bool(named.any() and numbered.all())}
    return RankMap(
        ranks=_ordered("ranks", pd.DataFrame([{"rank": rank, **facts, **identified}])),
        collectives=_ordered("collectives", collectives),
        segments=_ordered("segments", segments.assign(rank=rank)),
        layers=_layers(parts, segments, start, end, rank),
        steps=_ordered("steps", steps),
    )


def _numbers(steps: Int64Array) -> Int64Array:
    """The number of each step; their places where numbers repeat, as in a loop that counts each epoch from 0: two steps
    of one number would be compared as one.
    """
    return steps if len(np.unique(steps)) == len(steps) else np.arange(len(steps))


def _parts(
    trace: Trace,
    attribution: Attribution,
    windows: Windows,
    *,
    sort: npt.NDArray[np.int8],
    host: HostCalls,
    pid: int | None,
) -> _Parts:
    """The operations of the rank's device; if a process uses several, the one with the most communication, or work."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    weight = (end - start) * np.where(sort == COMM, 1 << 10, 1)
    allowed = np.array([pid is None or identity.pid == pid for identity in windows.devices])
    if not allowed.any():
        raise CaptureError(f"{trace.info.path}: the rank's process ran nothing on a GPU")
    weights = np.bincount(windows.of_op, weights=weight, minlength=len(windows.devices))
    device = int(np.where(allowed, weights, -1).argmax())
    rows = np.flatnonzero(windows.of_op == device)
    layer, phase = op_owners(attribution)
    step = np.append(_numbers(attribution.ranges.steps), NONE)[attribution.step[rows]]
    launch = np.where(host.of_op[rows] >= 0, host.start[host.of_op[rows]], start[rows])
    return _Parts(trace, attribution, windows, device, rows, sort[rows], launch, layer[rows], phase[rows], step)


def _ready(parts: _Parts, collectives: Int64Array, start: Int64Array, end: Int64Array, host: HostCalls) -> Int64Array:
    """When each collective could have begun: after its launch and the end of compute and copies launched before it."""
    order = np.argsort(parts.launch, kind="stable")
    work = np.where(parts.sort[order] == COMM, np.iinfo(np.int64).min, end[order])
    earlier_end = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(work)[:-1]))
    until = np.empty(len(order), dtype=np.int64)
    until[order] = earlier_end
    call = host.of_op[parts.rows[collectives]]
    launched = np.where(call >= 0, host.start[call], parts.launch[collectives])
    ready: Int64Array = np.clip(np.maximum(until[collectives], launched), start.min(initial=0), start[collectives])
    return ready


def _gates(parts: _Parts, collectives: Int64Array, start: Int64Array, end: Int64Array) -> npt.NDArray[np.bool_]:
    """Whether the device computed nothing when each collective ended."""
    works = np.flatnonzero(parts.sort == COMPUTE)
    works = works[np.argsort(start[works], kind="stable")]
    latest_end = np.append(np.maximum.accumulate(end[works]), np.iinfo(np.int64).min)
    previous = np.searchsorted(start[works], end[collectives], side="left") - 1
    quiet: npt.NDArray[np.bool_] = latest_end[previous] <= end[collectives]
    return quiet


def _idle(parts: _Parts, start: Int64Array, end: Int64Array) -> IdleGaps:
    """The idle gaps of the device, each in one of its windows."""
    of_device = parts.windows.device == parts.device
    bounds = np.unique(
        np.concatenate((parts.windows.start[of_device], parts.windows.end[of_device], start[start == end]))
    )
    return idle_gaps(start, end, bounds)


def _names(of_op: pd.Categorical, of_gap: Any) -> _Names:
    names = [*of_op.categories, *of_gap.categories]
    distinct, code_of_name = np.unique(np.array(names, dtype=object), return_inverse=True)
    code_of_name = np.append(code_of_name, NONE).astype(np.int32)
    of_gaps = of_gap.codes.to_numpy().astype(np.int32) + np.int32(len(of_op.categories))
    return _Names(distinct, np.append(code_of_name[of_op.codes], np.int32(NONE)), code_of_name[of_gaps])


def _segments(
    parts: _Parts, lane: Lane, idle: IdleGaps, *, gaps: pd.DataFrame, collectives: Int64Array, start: Int64Array
) -> pd.DataFrame:
    """The table ``segments``: sums over the pieces by segment, step, names (those of gaps are their causes) and
    collective.
    """
    import pandas as pd

    states = pd.Categorical.from_codes([-1, 0, 1, 2], categories=pd.Index(list(DOING.values())))
    names = {
        name: _names(of_op, gaps[of_gap].cat)
        for name, of_op, of_gap in (
            ("doing", states, "cause"),
            ("layer", parts.layer, "layer"),
            ("phase", parts.phase, "phase"),
        )
    }
    # columns of operations have an entry for `NONE` appended
    start, collective = np.append(start, NONE), np.full(len(start) + 1, NONE, dtype=np.int64)
    collective[collectives] = np.arange(len(collectives))
    windows = parts.windows
    device_steps = np.flatnonzero((windows.device == parts.device) & windows.in_step)
    ends, steps = np.append(windows.end[device_steps], np.iinfo(np.int64).min), windows.step[device_steps]
    rows = np.flatnonzero(lane.state == IDLE)
    gap = latest(idle.start, lane.start[rows])
    inside = latest(windows.start[device_steps], lane.start)
    keys: dict[str, npt.NDArray[Any]] = {
        "segment": lane.segment,
        "step": np.where(lane.start < ends[inside], np.append(steps, NONE)[inside], NONE),
        "doing": names["doing"].codes(lane.state, rows, gap),
        "layer": names["layer"].codes(lane.op, rows, gap),
        "phase": names["phase"].codes(lane.op, rows, gap),
        "collective": np.where(lane.state == COMM, collective[lane.op], NONE),
    }
    is_start = (lane.start == start[lane.op]) & (lane.op != NONE)
    distinct, sums = sums_by(list(keys.values()), [lane.end - lane.start, is_start.astype(np.int64)])
    columns: dict[str, Any] = dict(zip((*keys, "ns", "ops"), (*distinct, *sums), strict=True))
    for name, distinct_names in names.items():
        columns[name] = pd.Categorical.from_codes(columns[name], pd.Index(distinct_names.names))
    table: pd.DataFrame = pd.DataFrame(columns, copy=False)
    return table


def _layers(parts: _Parts, segments: pd.DataFrame, start: Int64Array, end: Int64Array, rank: int) -> pd.DataFrame:
    import pandas as pd

    keys = ["step", "layer", "phase"]
    codes: list[npt.NDArray[Any]] = [parts.step, parts.layer.codes, parts.phase.codes, parts.sort]
    (step, layer, phase, sort), (ns, ops) = sums_by(codes, [end - start, np.ones(len(start), dtype=np.int64)])
    owners = pd.DataFrame({
        "step": step,
        "layer": pd.Categorical.from_codes(layer, parts.layer.categories),
        "phase": pd.Categorical.from_codes(phase, parts.phase.categories),
        **{f"{name}_ns": np.where(sort == kind, ns, 0) for name, kind in _KINDS.items()},
        "ops": np.where(sort == COMPUTE, ops, 0),
    })  # fmt: skip
    idle = segments[~segments["doing"].isin(list(DOING.values())).to_numpy()]
    idle = idle[[*keys, "ns"]].assign(loading_ns=idle["ns"].where(idle["doing"] == "dataloader", 0))
    work, idling = (
        table.groupby(keys, observed=True).sum() for table in (owners, idle.rename(columns={"ns": "idle_ns"}))
    )
    table = work.join(idling, how="outer").fillna(0).astype("int64").reset_index()
    return _ordered("layers", table.assign(rank=rank))


_KINDS = {"compute": COMPUTE, "comm": COMM, "copy": COPY}


def _steps(parts: _Parts, rank: int) -> pd.DataFrame:
    import pandas as pd

    windows = parts.windows
    device_steps = (windows.device == parts.device) & windows.in_step
    columns = {"step": windows.step, "start_ns": windows.start, "end_ns": windows.end}
    table: pd.DataFrame = pd.DataFrame({name: values[device_steps] for name, values in columns.items()})
    of_rank: pd.DataFrame = table.assign(rank=rank)
    return of_rank


def _ordered(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Select the columns of the schema, with their types."""
    import pandas as pd

    columns = {
        # names stay codes: as text, millions of them take longer than all else
        name: frame[name] if isinstance(frame[name].dtype, pd.CategoricalDtype) else frame[name].to_numpy(column.dtype)
        for name, column in TABLES[table].items()
    }
    ordered: pd.DataFrame = pd.DataFrame(columns, copy=False)
    return ordered


COLLECTS = re.compile(r"(python[ .:]*)?gc([ .:(].*)?|garbage[ _-]collect(ion|or|ing)?.*", re.IGNORECASE)
"""Names of ranges around Python's garbage collection: ``gc``, ``gc.collect``, ``garbage collection``."""

_DATA_TEXTS = ("data", "dataloader")


def collecting(trace: Trace, pid: int) -> Int64Array:
    """Starts and ends of the process's garbage collections, from ranges, shape ``(2, n)``."""
    names = trace.ranges["text"].cat.categories
    codes = np.flatnonzero([COLLECTS.fullmatch(str(name)) is not None for name in names])
    selected = np.isin(trace.ranges["text"].cat.codes.to_numpy(), codes) & (trace.ranges["pid"].to_numpy() == pid)
    return np.stack([trace.ranges[edge].to_numpy()[selected] for edge in ("start_ns", "end_ns")])


def loading_code(trace: Trace) -> Int64Array:
    """Starts and ends of code loading and compilation, shape ``(2, n)``."""
    if trace.loads is None or not len(trace.loads):
        return np.zeros((2, 0), dtype=np.int64)
    return np.stack([trace.loads[edge].to_numpy() for edge in ("start_ns", "end_ns")])


def with_host_causes(gaps: pd.DataFrame, intervals: Mapping[str, Int64Array]) -> pd.DataFrame:
    """Replace the cause of an idle gap if most of it overlaps an interval of another cause."""
    start, durations = gaps["start_ns"].to_numpy(), gaps["idle_ns"].to_numpy()
    for cause, (starts, ends) in intervals.items():
        if not len(starts):
            continue
        lane = np.zeros(len(start), dtype=np.int64)
        covered = Cover(np.zeros(len(starts), dtype=np.int64), starts, ends).inside(lane, start, start + durations)
        causes = gaps["cause"].cat
        named_causes = gaps["cause"] if cause in causes.categories else causes.add_categories([cause])
        gaps = gaps.assign(cause=named_causes.mask((2 * covered > durations) & (durations > 0), cause))
    return gaps


def host_times(
    attribution: Attribution, pid: int, pauses: Int64Array, instances: Int64Array
) -> dict[str, npt.NDArray[np.int64]]:
    """Host time of each step instance: loading_ns (data loading) and gc_ns.

    Data loading counts for the enclosing step, otherwise for the next one.
    """
    ranges = attribution.ranges
    loads = (ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase_text, _DATA_TEXTS)) & (ranges.pid == pid)
    loads[loads] = _outermost(ranges.start[loads], ranges.end[loads])
    step_starts = np.full(len(ranges.steps), np.iinfo(np.int64).max)
    steps = np.flatnonzero((ranges.step >= 0) & (ranges.pid == pid))
    np.minimum.at(step_starts, ranges.step[steps], ranges.start[steps])
    order = np.argsort(step_starts, kind="stable")
    within = ranges.step_at(np.flatnonzero(loads))
    following = np.append(order, -1)[np.searchsorted(step_starts[order], ranges.start[loads])]
    of = np.where(within >= 0, within, following)
    loading = _by_step(of, (ranges.end - ranges.start)[loads], len(ranges.steps))
    last = np.append(order, -1)[np.searchsorted(step_starts[order], pauses[0], side="right") - 1]
    collected = _by_step(last, pauses[1] - pauses[0], len(ranges.steps))
    return {"loading_ns": loading[instances], "gc_ns": collected[instances]}


def _outermost(start: Int64Array, end: Int64Array) -> npt.NDArray[np.bool_]:
    """Which intervals are not nested in another."""
    order = np.lexsort((-end, start))
    latest_end = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end[order])[:-1]))[: len(order)]
    outer = np.zeros(len(order), dtype=bool)
    outer[order] = end[order] > latest_end
    return outer


def _by_step(step: Int64Array, durations: Int64Array, count: int) -> Int64Array:
    has_step = step >= 0
    sums: Int64Array = np.bincount(step[has_step], weights=durations[has_step], minlength=count).astype(np.int64)
    return sums
