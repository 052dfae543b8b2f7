"""Builds the map of one rank from its capture: collectives, device activity between them, layers and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.intervals import exact_sums, sums_by
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import op_owners
from nvprof_kit._analysis.attribution.warm_up import choose_steps
from nvprof_kit._analysis.attribution.windows import Windows, step_windows
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, activity
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.idle import largest_parts
from nvprof_kit._analysis.kernels.classes import classify
from nvprof_kit._analysis.ranks.maps.communication import communications
from nvprof_kit._analysis.ranks.maps.hosts import collecting, host_times, loading_code, with_host_causes
from nvprof_kit._analysis.ranks.maps.lane import Lane, lane_of, latest
from nvprof_kit._trace.jobs.schema import TABLES, RankMap
from nvprof_kit._trace.schema import BUSY_CALLS, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER

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
        mine = (self.windows.device == self.device) & self.windows.in_step
        found: Int64Array = self.windows.instance[mine]
        return found


class _Named(NamedTuple):
    """A column of names as codes into the sorted distinct names."""

    code: Int64Array
    names: npt.NDArray[Any]

    def of(self, rows: Int64Array) -> _Named:
        """Select rows."""
        return _Named(self.code[rows], self.names)


class _Pieces(NamedTuple):
    """The pieces of a device's time, as columns of the table ``segments``; codes, because there are millions."""

    segment: Int64Array
    step: Int64Array
    doing: _Named
    layer: _Named
    phase: _Named
    collective: Int64Array
    ns: Int64Array
    ops: Int64Array


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
    attribution = attribute(trace)
    windows = step_windows(trace, attribution) if len(trace.ops) else None
    if windows is None:
        raise CaptureError(f"{trace.info.path}: no operation ran on a GPU; ranks are compared by what their GPUs did")
    numbers = _numbers(attribution.ranges.steps)
    windows = replace(windows, step=np.where(windows.in_step, np.append(numbers, 0)[windows.instance], 0))
    classes = classify(trace.ops)
    active = activity(trace, classes, windows)
    host = HostCalls(trace)
    parts = _parts(trace, attribution, windows, sort=active.sort, host=host, pid=pid)
    start, end = (trace.ops[name].to_numpy()[parts.rows] for name in ("start_ns", "end_ns"))
    # one after the other: in threads of their own, these take more CPU time for memory than the clock gains
    found = communications(trace, parts.rows, parts.sort == COMM, parts.launch, parts.step)
    ready = _ready(parts, found.place, start, end, host)
    gates = _gates(parts, found.place, start, end)
    cuts = np.unique(np.concatenate((ready, end[found.place][gates], parts.windows.start, parts.windows.end)))
    cuts = cuts[(cuts >= start.min()) & (cuts <= end.max())]
    shown = choose_steps(trace, attribution).shown[parts.instances]
    gaps = largest_parts(trace, attribution, windows, active, host)
    gaps = gaps[windows.device[gaps["window"].to_numpy()] == parts.device]
    process = windows.devices[parts.device].pid
    pauses = collecting(trace, process)
    gaps = with_host_causes(gaps, {"gc": pauses, "warm_up": loading_code(trace)})
    lane = lane_of(start, end, parts.sort, cuts)
    pieces = _pieces(parts, lane, gaps, place=found.place, cuts=cuts, start=start)
    steps = _steps(parts, rank).assign(**host_times(attribution, process, pauses, parts.instances))
    steps["warm_up"] = ~shown
    collectives = found.table.assign(
        rank=rank,
        start_ns=start[found.place],
        end_ns=end[found.place],
        launch_ns=parts.launch[found.place],
        alone_ns=_alone(pieces, len(found.place)),
        ready_ns=ready,
        ready_segment=np.searchsorted(cuts, ready, side="right") - 1,
        end_segment=np.searchsorted(cuts, end[found.place], side="right") - 1,
        gates=gates,
        layer=np.asarray(parts.layer[found.place]),
        phase=np.asarray(parts.phase[found.place]),
    )
    return RankMap(
        ranks=_one_row(rank, facts | _identification(found.table)),
        collectives=_ordered("collectives", collectives),
        segments=_segments(pieces, rank),
        layers=_layers(parts, pieces, start, end, rank),
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
    allowed = np.array([pid is None or one.pid == pid for one in windows.devices])
    if not allowed.any():
        raise CaptureError(f"{trace.info.path}: the rank's process ran nothing on a GPU")
    spent = np.bincount(windows.of_op, weights=weight, minlength=len(windows.devices))
    device = int(np.where(allowed, spent, -1).argmax())
    rows = np.flatnonzero(windows.of_op == device)
    layer, phase = op_owners(attribution)
    step = np.append(_numbers(attribution.ranges.steps), NONE)[attribution.step[rows]]
    launch = np.where(host.of_op[rows] >= 0, host.start[host.of_op[rows]], start[rows])
    return _Parts(trace, attribution, windows, device, rows, sort[rows], launch, layer[rows], phase[rows], step)


def _ready(parts: _Parts, place: Int64Array, start: Int64Array, end: Int64Array, host: HostCalls) -> Int64Array:
    """When each collective could have begun: after its launch and the end of compute and copies launched before it."""
    order = np.argsort(parts.launch, kind="stable")
    work = np.where(parts.sort[order] == COMM, np.iinfo(np.int64).min, end[order])
    done = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(work)[:-1]))
    until = np.empty(len(order), dtype=np.int64)
    until[order] = done
    call = host.of_op[parts.rows[place]]
    launched = np.where(call >= 0, host.start[call], parts.launch[place])
    ready: Int64Array = np.clip(np.maximum(until[place], launched), start.min(initial=0), start[place])
    return ready


def _gates(parts: _Parts, place: Int64Array, start: Int64Array, end: Int64Array) -> npt.NDArray[np.bool_]:
    """Whether the device computed nothing when each collective ended."""
    works = np.flatnonzero(parts.sort == COMPUTE)
    works = works[np.argsort(start[works], kind="stable")]
    reach = np.append(np.maximum.accumulate(end[works]), np.iinfo(np.int64).min)
    began = np.searchsorted(start[works], end[place], side="left") - 1
    quiet: npt.NDArray[np.bool_] = reach[began] <= end[place]
    return quiet


def _pieces(
    parts: _Parts, lane: Lane, gaps: pd.DataFrame, *, place: Int64Array, cuts: Int64Array, start: Int64Array
) -> _Pieces:
    """The device's pieces with their names."""
    import pandas as pd

    gaps = gaps.sort_values("start_ns", kind="stable")
    idle = np.flatnonzero(lane.op == NONE)
    gap = latest(gaps["start_ns"].to_numpy(), lane.start[idle])
    owners = {
        name: _named(of_op, gaps[name].cat, nothing, lane.op, (idle, gap))
        for name, of_op, nothing in (("layer", parts.layer, NO_LAYER), ("phase", parts.phase, "other"))
    }
    doing = pd.Categorical.from_codes(np.array([-1, 0, 1, 2])[lane.state], categories=pd.Index(list(DOING.values())))
    collective = np.full(len(start) + 1, NONE, dtype=np.int64)
    collective[place] = np.arange(len(place))
    windows = parts.windows
    mine = np.flatnonzero((windows.device == parts.device) & windows.in_step)
    inside = latest(windows.start[mine], lane.start)
    within = lane.start < np.append(windows.end[mine], np.iinfo(np.int64).min)[inside]
    return _Pieces(
        segment=latest(cuts, lane.start) + 1,
        step=np.where(within, np.append(windows.step[mine], NONE)[inside], NONE),
        doing=_named(doing, gaps["cause"].cat, "other", np.arange(len(lane.op)), (idle, gap)),
        **owners,
        collective=np.where(lane.state == COMM, collective[lane.op], NONE),
        ns=lane.end - lane.start,
        ops=((lane.start == np.append(start, -1)[lane.op]) & (lane.op != NONE)).astype(np.int64),
    )


def _named(
    of_op: pd.Categorical, of_gap: Any, nothing: str, op: Int64Array, idle: tuple[Int64Array, Int64Array]
) -> _Named:
    """The names of pieces: of their operations `op`, for idle pieces of their gaps, otherwise `nothing`."""
    names = [*of_op.categories, *of_gap.categories, nothing]
    distinct, place = np.unique(np.array(names, dtype=object), return_inverse=True)
    codes = np.append(place[of_op.codes], NONE)[op]
    rows, gap = idle
    codes[rows] = np.append(place[len(of_op.categories) + of_gap.codes.to_numpy().astype(np.int64)], place[-1])[gap]
    return _Named(codes, distinct)


def _alone(pieces: _Pieces, count: int) -> Int64Array:
    """How long each collective ran while the device did nothing else."""
    mine = pieces.collective >= 0
    return exact_sums(pieces.collective[mine], pieces.ns[mine], count)


def _segments(pieces: _Pieces, rank: int) -> pd.DataFrame:
    keys = {name: getattr(pieces, name) for name in ("segment", "step", "doing", "layer", "phase", "collective")}
    return _ordered("segments", _summed(keys, {"ns": pieces.ns, "ops": pieces.ops}).assign(rank=rank))


def _layers(parts: _Parts, pieces: _Pieces, start: Int64Array, end: Int64Array, rank: int) -> pd.DataFrame:
    keys = ["step", "layer", "phase"]
    own: dict[str, Int64Array | _Named] = {
        "step": parts.step,
        "layer": _Named(parts.layer.codes.astype(np.int64), np.asarray(parts.layer.categories)),
        "phase": _Named(parts.phase.codes.astype(np.int64), np.asarray(parts.phase.categories)),
    }
    sorts = {"compute_ns": COMPUTE, "comm_ns": COMM, "copy_ns": COPY}
    spent = {name: np.where(parts.sort == sort, end - start, 0) for name, sort in sorts.items()}
    table = _summed(own, {**spent, "ops": (parts.sort == COMPUTE).astype(np.int64)}).set_index(keys)
    idle = np.flatnonzero(~np.isin(pieces.doing.names, list(DOING.values()))[pieces.doing.code])
    of: dict[str, Int64Array | _Named] = {
        "step": pieces.step[idle],
        "layer": pieces.layer.of(idle),
        "phase": pieces.phase.of(idle),
    }
    ns, loads = pieces.ns[idle], (pieces.doing.names == "dataloader")[pieces.doing.code[idle]]
    idling = _summed(of, {"idle_ns": ns, "loading_ns": np.where(loads, ns, 0)}).set_index(keys)
    table = table.join(idling, how="outer").fillna(0).astype("int64").reset_index()
    return _ordered("layers", table.assign(rank=rank))


def _summed(keys: Mapping[str, Int64Array | _Named], values: Mapping[str, Int64Array]) -> pd.DataFrame:
    """Sums by several keys, sorted by key."""
    import pandas as pd

    found, sums = sums_by([one.code if isinstance(one, _Named) else one for one in keys.values()], values.values())
    columns: dict[str, Any] = {}
    for (name, key), codes in zip(keys.items(), found, strict=True):
        columns[name] = pd.Categorical.from_codes(codes, pd.Index(key.names)) if isinstance(key, _Named) else codes
    made: pd.DataFrame = pd.DataFrame({**columns, **dict(zip(values, sums, strict=True))}, copy=False)
    return made


def _steps(parts: _Parts, rank: int) -> pd.DataFrame:
    import pandas as pd

    windows = parts.windows
    mine = (windows.device == parts.device) & windows.in_step
    table = pd.DataFrame({"step": windows.step[mine], "start_ns": windows.start[mine], "end_ns": windows.end[mine]})
    made: pd.DataFrame = table.assign(rank=rank)
    return made


def _identification(collectives: pd.DataFrame) -> dict[str, bool]:
    """How a rank's collectives are identified: by communicator ids, by sequence numbers."""
    named = ~collectives["comm"].str.startswith("stream ")
    numbered = collectives["sequence"][named] >= 0
    return {"named": bool(named.any()), "numbered": bool(named.any() and numbered.all())}


def _one_row(rank: int, facts: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return _ordered("ranks", pd.DataFrame([{"rank": rank, **facts}]))


def _ordered(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Select the columns of the schema, with their types."""
    import pandas as pd

    columns = {
        # names stay codes: as text, millions of them take longer than all else
        name: frame[name] if isinstance(frame[name].dtype, pd.CategoricalDtype) else frame[name].to_numpy(column.dtype)
        for name, column in TABLES[table].items()
    }
    made: pd.DataFrame = pd.DataFrame(columns, copy=False)
    return made
