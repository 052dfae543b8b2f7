"""Builds the map of one rank from its capture: collectives, device activity between them, layers and steps.

Host delays beyond those in idle gaps are mapped too: data loading, garbage collection, code loading.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array, exact_sums, sums_by
from nvprof_kit._analysis.attribution.steps import Windows, choose_steps, step_windows
from nvprof_kit._analysis.breakdown.devices import COMM, COMPUTE, COPY, Gaps, op_sorts
from nvprof_kit._analysis.breakdown.devices import idle as idle_causes
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.kernels.classes import classify
from nvprof_kit._ranks.communication import PASSING, communications
from nvprof_kit._trace.jobs.schema import RankMap
from nvprof_kit._trace.schema import BUSY_CALLS, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import Category

OPTIONAL = ("name", "stream", "calls", BUSY_CALLS, "collectives", "marks", "loads")
"""What `nvprof_kit._trace.open.open_capture` must read."""

DOING = {COMPUTE: "compute", COMM: "communication", COPY: "copy"}

COLLECTS = re.compile(r"(python[ .:]*)?gc([ .:(].*)?|garbage[ _-]collect(ion|or|ing)?.*", re.IGNORECASE)
"""Names of ranges around Python's garbage collection: ``gc``, ``gc.collect``, ``garbage collection``."""

_DATA_TEXTS = ("data", "dataloader")
_BEFORE_ALL = int(np.iinfo(np.int64).min)


class _Operations(NamedTuple):
    """The operations of the rank's device, in order of the capture.

    Attributes:
        start, end: In ns.
        sort: `COMPUTE`, `COMM` or `COPY`.
        launch: Start of the launching call.
        step: Step number, `NONE` outside.
        layer, phase: Owners, categorical.
    """

    start: Int64Array
    end: Int64Array
    sort: npt.NDArray[np.int8]
    launch: Int64Array
    step: Int64Array
    layer: pd.Categorical
    phase: pd.Categorical


class _Lane(NamedTuple):
    """A device's time without gaps or overlaps, shape ``(p,)`` each.

    Attributes:
        start, end: In ns.
        op: The operation that runs: a computing one, else one that communicates, else a copy; `NONE` if idle.
    """

    start: Int64Array
    end: Int64Array
    op: Int64Array


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
    if not len(trace.ops):
        raise CaptureError(f"{trace.info.path}: no operation ran on a GPU; ranks are compared by what their GPUs did")
    host, attribution = HostCalls(trace), attribute(trace)
    windows = step_windows(trace, attribution)
    # where numbers repeat, as in a loop that counts each epoch from 0, two steps would be compared as one
    steps = attribution.ranges.steps
    numbers = np.append(steps if len(np.unique(steps)) == len(steps) else np.arange(len(steps)), NONE)
    windows = replace(windows, step=np.where(windows.in_step, numbers[windows.instance], 0))
    sort = op_sorts(trace, classify(trace.ops))
    device = _device(trace, windows.of_op, sort, [pid is None or device.pid == pid for device in windows.devices])
    rows, call = np.flatnonzero(windows.of_op == device), host.of_op[windows.of_op == device]
    start, end = (trace.ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    launch = np.where(call >= 0, host.start[call], start)
    layer, phase = (owners[rows] for owners in attribution.owners)
    ops = _Operations(start, end, sort[rows], launch, numbers[attribution.step[rows]], layer, phase)
    comm_ops, comm = communications(trace, host, rows, ops.sort == COMM, launch=ops.launch, step=ops.step, rank=rank)
    ready, gates = _arrivals(ops, comm_ops)
    cuts = np.unique(np.concatenate((ready, end[comm_ops][gates], windows.start, windows.end)))
    cuts = cuts[(cuts >= start.min()) & (cuts <= end.max())]
    segments = device_segments(trace, attribution, windows, host, ops, device=device, collectives=comm_ops, cuts=cuts)
    alone = segments[segments["collective"] >= 0]
    collectives = comm.assign(
        rank=rank,
        start_ns=start[comm_ops],
        end_ns=end[comm_ops],
        alone_ns=exact_sums(alone["collective"].to_numpy(), alone["ns"].to_numpy(dtype=np.int64), len(comm_ops)),
        ready_ns=ready,
        ready_segment=np.searchsorted(cuts, ready, side="right") - 1,
        end_segment=np.searchsorted(cuts, end[comm_ops], side="right") - 1,
        gates=gates,
        layer=np.asarray(layer[comm_ops]),
        phase=np.asarray(phase[comm_ops]),
    )
    # how the collectives are identified: by communicator ids, by sequence numbers; messages are matched by order
    named = ~comm["comm"].str.startswith("stream ")
    numbered = (comm["sequence"] >= 0)[named & ~comm["comm"].str.contains(PASSING, regex=True)]
    identified = {"named": bool(named.any()), "numbered": bool(named.any() and numbered.all())}
    in_step = np.flatnonzero((windows.device == device) & windows.in_step)
    return RankMap(
        ranks=pd.DataFrame([{"rank": rank, **facts, **identified}]),
        collectives=collectives,
        segments=segments.assign(rank=rank),
        layers=_layers(ops, segments).assign(rank=rank),
        steps=_steps(trace, attribution, windows, in_step, windows.devices[device].pid).assign(rank=rank),
    )


def _device(trace: Trace, of_op: Int64Array, sort: npt.NDArray[np.int8], allowed: list[bool]) -> int:
    """The rank's device; if a process uses several, the one with the most communication, or work."""
    if not any(allowed):
        raise CaptureError(f"{trace.info.path}: the rank's process ran nothing on a GPU")
    durations = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy() * np.where(sort == COMM, 1 << 10, 1)
    weights = np.bincount(of_op, weights=durations, minlength=len(allowed))
    return int(np.where(allowed, weights, -1).argmax())


def _arrivals(ops: _Operations, collectives: Int64Array) -> tuple[Int64Array, Bools]:
    """When each collective could have begun: after its launch and the end of compute and copies launched before it; and
    whether the device computed nothing when it ended.
    """
    order = np.argsort(ops.launch, kind="stable")
    work = np.where(ops.sort[order] == COMM, _BEFORE_ALL, ops.end[order])
    until = np.empty(len(order), dtype=np.int64)
    until[order] = np.concatenate(([_BEFORE_ALL], np.maximum.accumulate(work)[:-1]))
    possible = np.maximum(until[collectives], ops.launch[collectives])
    ready = np.clip(possible, ops.start.min(initial=0), ops.start[collectives])
    computing = np.flatnonzero(ops.sort == COMPUTE)
    computing = computing[np.argsort(ops.start[computing], kind="stable")]
    latest_end = np.append(np.maximum.accumulate(ops.end[computing]), _BEFORE_ALL)
    previous = np.searchsorted(ops.start[computing], ops.end[collectives], side="left") - 1
    return ready, latest_end[previous] <= ops.end[collectives]


# ---------------------------------------------------------------- device activity


def _lane(ops: _Operations, cuts: Int64Array) -> _Lane:
    """Cut a device's time into pieces where an operation begins or ends, and at the cuts, which are ascending."""
    # a stable sort merges what is nearly sorted already; np.unique is slower
    bounds = np.sort(np.concatenate((np.sort(ops.start, kind="stable"), ops.end, cuts)), kind="stable")
    bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
    op = np.full(len(bounds) - 1, NONE, dtype=np.int64)
    for kind in (COPY, COMM, COMPUTE):  # later ones take precedence
        rows = np.flatnonzero((ops.sort == kind) & (ops.end > ops.start))
        running = _running(ops, rows[np.lexsort((ops.end[rows], ops.start[rows]))], bounds[:-1])
        op = np.where(running == NONE, op, running)
    return _Lane(bounds[:-1], bounds[1:], op)


def _running(ops: _Operations, rows: Int64Array, times: Int64Array) -> Int64Array:
    """The operation that runs at each moment, the first to begin if there are several; else `NONE`.

    Args:
        ops: The operations.
        rows: Those to look at, by start and end.
        times: The moments, ascending.
    """
    if not len(rows):
        return np.full(len(times), NONE, dtype=np.int64)
    # an operation that ends inside an earlier one is hidden by it
    latest_end = np.maximum.accumulate(ops.end[rows])
    hidden_until = np.concatenate(([_BEFORE_ALL], latest_end[:-1]))
    is_visible = ops.end[rows] > hidden_until
    visible = rows[is_visible]
    index = np.searchsorted(np.maximum(ops.start[rows], hidden_until)[is_visible], times, side="right") - 1
    candidate = visible[np.maximum(index, 0)]
    return np.where((index >= 0) & (ops.end[candidate] > times), candidate, NONE)


def _gaps(lane: _Lane, bounds: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The idle gaps of the device: the gap of each piece, `NONE` if it is busy, and starts and ends of the gaps.

    Args:
        lane: The pieces.
        bounds: Times at which a gap ends and the next begins.
    """
    is_idle = lane.op == NONE
    is_first = is_idle & (np.append(True, ~is_idle[:-1]) | np.isin(lane.start, bounds))
    gap = np.where(is_idle, np.cumsum(is_first) - 1, NONE)
    start = lane.start[is_first]
    return gap, start, start + exact_sums(gap[is_idle], (lane.end - lane.start)[is_idle], len(start))


def device_segments(
    trace: Trace,
    attribution: Attribution,
    windows: Windows,
    host: HostCalls,
    ops: _Operations,
    *,
    device: int,
    collectives: Int64Array,
    cuts: Int64Array,
) -> pd.DataFrame:
    """The table ``segments``: what a device did between the cuts, by step, names (those of gaps are their causes) and
    collective.

    Args:
        trace: The capture.
        attribution: The layer and step of each operation.
        windows: The windows of all devices.
        host: The calls of the host.
        ops: The operations of the device.
        device: The device.
        collectives: Those that are collectives.
        cuts: Where a segment ends and the next begins.
    """
    lane, of_device = _lane(ops, cuts), np.flatnonzero(windows.device == device)

    def window_at(times: Int64Array) -> Int64Array:
        return of_device[np.searchsorted(windows.start[of_device], times, side="right") - 1]

    bounds = np.concatenate((windows.start[of_device], windows.end[of_device], ops.start[ops.start == ops.end]))
    gap, gap_start, gap_end = _gaps(lane, bounds)
    idle = Gaps(window_at(gap_start), gap_start, gap_end - gap_start)
    gaps = idle_causes(trace, attribution, windows, idle, host).gaps
    window = window_at(lane.start)
    is_in_step = windows.in_step[window] & (windows.start[window] <= lane.start) & (lane.start < windows.end[window])
    step = np.where(is_in_step, windows.step[window], NONE)
    segment = np.searchsorted(cuts, lane.start, side="right")
    states = pd.Categorical.from_codes(ops.sort - 1, categories=pd.Index(list(DOING.values())))
    owner = np.where(lane.op == NONE, len(ops.start) + gap, lane.op)  # the operations, then the gaps
    names: dict[str, pd.Index[str]] = {}
    codes: dict[str, npt.NDArray[Any]] = {}
    for name, of_op, of_gap in (
        ("doing", states, gaps["cause"].array),
        ("layer", ops.layer, gaps["layer"].array),
        ("phase", ops.phase, gaps["phase"].array),
    ):
        names[name] = pd.Index(sorted({*of_op.categories, *of_gap.categories}), dtype=object)
        both = [column.set_categories(names[name]).codes for column in (of_op, of_gap)]
        codes[name] = np.concatenate(both).astype(np.int32)[owner]
    collective = np.full(len(ops.start) + 1, NONE, dtype=np.int64)  # the last is of `NONE`
    collective[collectives] = np.arange(len(collectives))
    keys: dict[str, npt.NDArray[Any]] = {"segment": segment, "step": step, **codes, "collective": collective[lane.op]}
    is_start = (lane.op != NONE) & (lane.start == ops.start[lane.op])
    distinct, sums = sums_by(list(keys.values()), [lane.end - lane.start, is_start.astype(np.int64)])
    columns: dict[str, Any] = dict(zip((*keys, "ns", "ops"), (*distinct, *sums), strict=True))
    for name, categories in names.items():
        columns[name] = pd.Categorical.from_codes(columns[name], categories)
    return pd.DataFrame(columns, copy=False)


def _layers(ops: _Operations, segments: pd.DataFrame) -> pd.DataFrame:
    keys, kinds = ["step", "layer", "phase"], {"compute": COMPUTE, "comm": COMM, "copy": COPY}
    codes: list[npt.NDArray[Any]] = [ops.step, ops.layer.codes, ops.phase.codes, ops.sort]
    (step, layer, phase, sort), (ns, count) = sums_by(codes, [ops.end - ops.start, np.ones_like(ops.start)])
    owners = pd.DataFrame({
        "step": step,
        "layer": pd.Categorical.from_codes(layer, ops.layer.categories),
        "phase": pd.Categorical.from_codes(phase, ops.phase.categories),
        **{f"{name}_ns": np.where(sort == kind, ns, 0) for name, kind in kinds.items()},
        "ops": np.where(sort == COMPUTE, count, 0),
    })  # fmt: skip
    idle = segments[~segments["doing"].isin(list(DOING.values())).to_numpy()].rename(columns={"ns": "idle_ns"})
    idle = idle[[*keys, "idle_ns"]].assign(loading_ns=idle["idle_ns"].where(idle["doing"] == "dataloader", 0))
    work, idling = (table.groupby(keys, observed=True).sum() for table in (owners, idle))
    return work.join(idling, how="outer").fillna(0).astype("int64").reset_index()


# ---------------------------------------------------------------- steps


def _steps(trace: Trace, attribution: Attribution, windows: Windows, rows: Int64Array, pid: int) -> pd.DataFrame:
    """The table ``steps`` without the rank, of the windows in these rows: when each began and ended on the device, and
    how long the host of the process loaded data and collected garbage.

    Data loading counts for the enclosing step, otherwise for the next one.
    """
    ranges, count = attribution.ranges, len(attribution.ranges.steps)
    is_load = ranges.is_one_of((Category.DATA,)) | np.isin(ranges.phase_text, _DATA_TEXTS)
    loads = np.flatnonzero(is_load & (ranges.pid == pid))
    # those that are not inside another
    loads = loads[np.lexsort((-ranges.end[loads], ranges.start[loads]))]
    latest_end = np.concatenate(([_BEFORE_ALL], np.maximum.accumulate(ranges.end[loads])))[: len(loads)]
    loads = loads[ranges.end[loads] > latest_end]
    step_starts = np.full(count, np.iinfo(np.int64).max)
    of_steps = np.flatnonzero((ranges.step >= 0) & (ranges.pid == pid))
    np.minimum.at(step_starts, ranges.step[of_steps], ranges.start[of_steps])
    order = np.argsort(step_starts, kind="stable")
    within = ranges.step_at(loads)
    following = np.append(order, NONE)[np.searchsorted(step_starts[order], ranges.start[loads])]
    texts = trace.ranges["text"].cat
    codes = np.flatnonzero([COLLECTS.fullmatch(str(text)) is not None for text in texts.categories])
    collections = trace.ranges[np.isin(texts.codes, codes) & (trace.ranges["pid"] == pid)]
    previous = np.searchsorted(step_starts[order], collections["start_ns"], side="right") - 1
    instances = windows.instance[rows]
    is_shown = choose_steps(trace, attribution).shown[instances]
    steps: pd.DataFrame = pd.DataFrame({"step": windows.step[rows], "warm_up": ~is_shown})
    steps["start_ns"], steps["end_ns"] = windows.start[rows], windows.end[rows]
    for name, step, durations in (
        ("loading_ns", np.where(within >= 0, within, following), (ranges.end - ranges.start)[loads]),
        ("gc_ns", np.append(order, NONE)[previous], (collections["end_ns"] - collections["start_ns"]).to_numpy()),
    ):
        steps[name] = exact_sums(step[step >= 0], durations[step >= 0], count)[instances]
    return steps
