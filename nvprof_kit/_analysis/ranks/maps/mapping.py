"""The map of one rank, made from its capture: collectives, what the device did between them, layers and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import op_owners
from nvprof_kit._analysis.attribution.warm_up import choose_steps
from nvprof_kit._analysis.attribution.windows import Windows, step_windows
from nvprof_kit._analysis.breakdown.activity import COMM, COMPUTE, COPY, activity
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.idle import idle
from nvprof_kit._analysis.kernels.classes import classify
from nvprof_kit._analysis.ranks.maps.communication import communications
from nvprof_kit._analysis.ranks.maps.hosts import collecting, host_times, loading_code, with_host_causes
from nvprof_kit._analysis.ranks.maps.lane import Lane, lane_of
from nvprof_kit._trace.frames import labels
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
    """What the tables are made from, all on one device."""

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
        """The instances of steps that the device has, in the order of its windows."""
        mine = (self.windows.device == self.device) & self.windows.in_step
        found: Int64Array = self.windows.instance[mine]
        return found


def map_rank(trace: Trace, rank: int, facts: dict[str, Any], pid: int | None = None) -> RankMap:
    """Condense a capture to a rank's map.

    Args:
        trace: The capture, opened with `OPTIONAL`.
        rank: The rank.
        facts: The other columns of the schema's table ``ranks``.
        pid: The rank's process where the capture holds several ranks; None for all.

    Raises:
        CaptureError: The rank ran nothing on a GPU.
    """
    attribution = attribute(trace)
    windows = step_windows(trace, attribution) if len(trace.ops) else None
    if windows is None:
        raise CaptureError(f"{trace.info.path}: no operation ran on a GPU; ranks are compared by what their GPUs did")
    classes = classify(trace.ops)
    active = activity(trace, classes, windows)
    host = HostCalls(trace)
    idling = idle(trace, attribution, windows, active, host)
    parts = _parts(trace, attribution, windows, sort=active.sort, host=host, pid=pid)
    found = communications(trace, parts.rows, parts.sort == COMM, parts.launch, parts.step)
    start, end = (trace.ops[name].to_numpy()[parts.rows] for name in ("start_ns", "end_ns"))
    ready = _ready(parts, found.place, start, end, host)
    gates = _gates(parts, found.place, start, end)
    cuts = np.unique(np.concatenate((ready, end[found.place][gates], parts.windows.start, parts.windows.end)))
    cuts = cuts[(cuts >= start.min()) & (cuts <= end.max())]
    lane = lane_of(start, end, parts.sort, cuts)
    gaps = idling.gaps[windows.device[idling.gaps["window"].to_numpy()] == parts.device]
    process = windows.devices[parts.device].pid
    pauses = collecting(trace, process)
    gaps = with_host_causes(gaps, {"gc": pauses, "warm_up": loading_code(trace)})
    pieces = _pieces(parts, lane, gaps, place=found.place, cuts=cuts, start=start)
    steps = _steps(parts, rank).assign(**host_times(attribution, process, pauses, parts.instances))
    steps["warm_up"] = ~choose_steps(trace, attribution).shown[parts.instances]
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
        ranks=_one_row(rank, facts | _told(found.table)),
        collectives=_ordered("collectives", collectives),
        segments=_segments(pieces, rank),
        layers=_layers(parts, pieces, start, end, rank),
        steps=_ordered("steps", steps),
    )


def _parts(
    trace: Trace,
    attribution: Attribution,
    windows: Windows,
    *,
    sort: npt.NDArray[np.int8],
    host: HostCalls,
    pid: int | None,
) -> _Parts:
    """The operations of the rank's device: where a process uses several, the one that communicates, or works, most."""
    start, end = trace.ops["start_ns"].to_numpy(), trace.ops["end_ns"].to_numpy()
    weight = (end - start) * np.where(sort == COMM, 1 << 10, 1)
    allowed = np.array([pid is None or one.pid == pid for one in windows.devices])
    if not allowed.any():
        raise CaptureError(f"{trace.info.path}: the rank's process ran nothing on a GPU")
    spent = np.bincount(windows.of_op, weights=weight, minlength=len(windows.devices))
    device = int(np.where(allowed, spent, -1).argmax())
    rows = np.flatnonzero(windows.of_op == device)
    layer, phase = op_owners(attribution)
    step = np.append(attribution.ranges.steps, NONE)[attribution.step[rows]]
    launch = np.where(host.of_op[rows] >= 0, host.start[host.of_op[rows]], start[rows])
    return _Parts(trace, attribution, windows, device, rows, sort[rows], launch, layer[rows], phase[rows], step)


def _ready(parts: _Parts, place: Int64Array, start: Int64Array, end: Int64Array, host: HostCalls) -> Int64Array:
    """When each collective could have begun but for its stream: its launch, and the end of what was launched before."""
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
) -> pd.DataFrame:
    """The device's pieces with their names."""
    import pandas as pd

    gaps = gaps.sort_values("start_ns", kind="stable")
    at = np.searchsorted(gaps["start_ns"].to_numpy(), lane.start, side="right") - 1
    idle_piece = lane.op == NONE
    named = {}
    for name, of_op, nothing in (("layer", parts.layer, NO_LAYER), ("phase", parts.phase, "other")):
        # as codes: millions of names would be slow
        of_gap = gaps[name].cat
        names = [*of_op.categories, *of_gap.categories, nothing]
        gap = np.append(of_gap.codes.to_numpy().astype(np.int64) + len(of_op.categories), len(names) - 1)[at]
        named[name] = labels(np.where(idle_piece, gap, of_op.codes[lane.op]), names)
    causes = gaps["cause"].cat
    states = [*DOING.values(), *causes.categories, "other"]
    gap_code = np.append(causes.codes.to_numpy().astype(np.int64) + 3, len(states) - 1)[at]
    state_code = np.array([-1, 0, 1, 2])[lane.state]
    doing = labels(np.where(idle_piece, gap_code, state_code), states)
    collective = np.full(len(start) + 1, NONE, dtype=np.int64)
    collective[place] = np.arange(len(place))
    windows = parts.windows
    mine = np.flatnonzero((windows.device == parts.device) & windows.in_step)
    inside = np.searchsorted(windows.start[mine], lane.start, side="right") - 1
    within = (inside >= 0) & (lane.start < np.append(windows.end[mine], 0)[np.maximum(inside, 0)])
    step = np.where(within, np.append(windows.step[mine], NONE)[np.where(within, inside, -1)], NONE)
    pieces: pd.DataFrame = pd.DataFrame(
        {
            "segment": np.searchsorted(cuts, lane.start, side="right"),
            "step": step,
            "doing": doing,
            **named,
            "collective": np.where(lane.state == COMM, collective[lane.op], NONE),
            "ns": lane.end - lane.start,
            "ops": (lane.start == np.append(start, -1)[lane.op]) & ~idle_piece,
        }
    )
    return pieces


def _alone(pieces: pd.DataFrame, count: int) -> Int64Array:
    """How long each collective ran while the device did nothing else."""
    of = pieces["collective"].to_numpy()
    mine = of >= 0
    spent: Int64Array = np.bincount(of[mine], weights=pieces["ns"].to_numpy()[mine], minlength=count).astype(np.int64)
    return spent


def _segments(pieces: pd.DataFrame, rank: int) -> pd.DataFrame:
    keys = ["segment", "step", "doing", "layer", "phase", "collective"]
    table = pieces.groupby(keys, sort=True, observed=True)[["ns", "ops"]].sum().reset_index()
    return _ordered("segments", table.assign(rank=rank))


def _layers(parts: _Parts, pieces: pd.DataFrame, start: Int64Array, end: Int64Array, rank: int) -> pd.DataFrame:
    import pandas as pd

    took = end - start
    frame = pd.DataFrame({"step": parts.step, "layer": parts.layer, "phase": parts.phase})
    for name, sort in (("compute_ns", COMPUTE), ("comm_ns", COMM), ("copy_ns", COPY)):
        frame[name] = np.where(parts.sort == sort, took, 0)
    frame["ops"] = (parts.sort == COMPUTE).astype(np.int64)
    keys = ["step", "layer", "phase"]
    table = frame.groupby(keys, sort=True, observed=True)[["compute_ns", "comm_ns", "copy_ns", "ops"]].sum()
    table = _plain(table)
    idling = pieces[~pieces["doing"].isin(list(DOING.values()))]
    idle_ns = _plain(idling.groupby(keys, observed=True)[["ns"]].sum())["ns"].rename("idle_ns")
    loads = idling[idling["doing"] == "dataloader"]
    loading_ns = _plain(loads.groupby(keys, observed=True)[["ns"]].sum())["ns"].rename("loading_ns")
    table = table.join(idle_ns, how="outer").join(loading_ns, how="left").fillna(0).astype("int64").reset_index()
    return _ordered("layers", table.assign(rank=rank))


def _plain(sums: pd.DataFrame) -> pd.DataFrame:
    """Sums by step, layer and phase whose names are text, so that those of several tables are the same."""
    made: pd.DataFrame = sums.reset_index().astype({"layer": object, "phase": object}).set_index(list(sums.index.names))
    return made


def _steps(parts: _Parts, rank: int) -> pd.DataFrame:
    import pandas as pd

    windows = parts.windows
    mine = (windows.device == parts.device) & windows.in_step
    table = pd.DataFrame({"step": windows.step[mine], "start_ns": windows.start[mine], "end_ns": windows.end[mine]})
    made: pd.DataFrame = table.assign(rank=rank)
    return made


def _told(collectives: pd.DataFrame) -> dict[str, bool]:
    """How a rank's collectives are told from one another: by ids of communicators, by sequence numbers."""
    named = ~collectives["comm"].str.startswith("stream ")
    numbered = collectives["sequence"][named] >= 0
    return {"named": bool(named.any()), "numbered": bool(named.any() and numbered.all())}


def _one_row(rank: int, facts: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return _ordered("ranks", pd.DataFrame([{"rank": rank, **facts}]))


def _ordered(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of the schema with their types, and no others."""
    schema = TABLES[table]
    made: pd.DataFrame = frame[list(schema)].astype({name: column.dtype for name, column in schema.items()})
    return made
