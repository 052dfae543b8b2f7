"""The page of a job: verdict, heat maps by rank, wait matrix, timelines of selected ranks, and what-if."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._ranks.answer import job_size
from nvprof_kit._report.page.tables import PageTable, page_table, short_text
from nvprof_kit._report.page.template import render
from nvprof_kit._report.page.timeline import Block, Texts
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._ranks.answer import Ranks
    from nvprof_kit._trace.jobs.tables import JobTables


WAITING, TRANSFER = "waiting", "transfer"
_WORK_COLUMNS = ("start_ns", "end_ns", "step", "doing", "layer", "phase")


def work_of(points: pd.DataFrame, segments: pd.DataFrame) -> pd.DataFrame:
    """A row for each piece of a rank's segments, on the common clock.

    Args:
        points: The collectives of one rank, with the columns of `nvprof_kit._trace.jobs.tables.JobTables.points`.
        segments: Its segments, in order.

    Returns:
        start_ns, end_ns, step, doing, layer, phase; empty if no point gives the time of the segments.
    """
    import pandas as pd

    length = segments["ns"].to_numpy(dtype=np.int64)
    reached = np.cumsum(length)
    number = segments["segment"].to_numpy()
    segment = np.concatenate([points["ready_segment"], points["end_segment"][points["gates"]]]).astype(np.int64)
    when = np.concatenate([points["a"] - points["queued_ns"], points["e"][points["gates"]]]).astype(np.int64)
    position = np.searchsorted(number, segment, side="right") - 1
    usable = (segment >= 0) & (position >= 0)
    if not usable.any():
        empty: pd.DataFrame = pd.DataFrame(
            {column: [] for column in ("start_ns", "end_ns", "step", "doing", "layer", "phase")}
        )
        return empty
    at, time = reached[position[usable]], when[usable]
    order = np.lexsort((time, at))
    at, first = np.unique(at[order], return_index=True)
    time = np.maximum.accumulate(time[order][first])
    ends = np.interp(reached, at, time)
    ends = np.where(reached < at[0], time[0] - (at[0] - reached), ends)
    ends = np.where(reached > at[-1], time[-1] + (reached - at[-1]), ends).astype(np.int64)
    starts = np.concatenate(([ends[0] - length[0]], ends[:-1])) if len(ends) else ends
    pieces = segments[["step", "doing", "layer", "phase"]].assign(start_ns=starts, end_ns=ends)
    work: pd.DataFrame = pieces[pieces["end_ns"] > pieces["start_ns"]]
    return work


def collectives_of(points: pd.DataFrame) -> pd.DataFrame:
    """The waiting and transfers of one rank's collectives: start_ns, end_ns, step, doing, text.

    Args:
        points: With a, e, arrival (the last rank's), late_rank, sort, step.
    """
    import pandas as pd

    points = points.sort_values("a", kind="stable")
    start, end = points["a"].to_numpy(dtype=np.int64), points["e"].to_numpy(dtype=np.int64)
    begun = np.clip(points["arrival"].to_numpy(dtype=np.int64), start, np.maximum(end, start))
    waits = points["sort"] + ", waits for rank " + points["late_rank"].astype(str)
    labels = points[["step", "layer", "phase"]]
    parts = [
        labels.assign(start_ns=start, end_ns=begun, doing=WAITING, text=waits),
        labels.assign(start_ns=begun, end_ns=end, doing=TRANSFER, text=points["sort"]),
    ]
    both = pd.concat(parts, ignore_index=True)
    pieces: pd.DataFrame = both[both["end_ns"] > both["start_ns"]].sort_values(
        "start_ns", kind="stable", ignore_index=True
    )
    return pieces


def apart(frame: pd.DataFrame, max_frames: int = 4) -> list[pd.DataFrame]:
    """Split rows into as few frames without overlaps as possible; rows beyond `most` frames are dropped."""
    frames: list[pd.DataFrame] = []
    while len(frame) and len(frames) < max_frames:
        start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
        if (start[1:] >= end[:-1]).all():
            frames.append(frame)
            break
        is_free, latest_end = np.zeros(len(frame), dtype=bool), np.iinfo(np.int64).min
        for row, (row_start, row_end) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            if row_start >= latest_end:
                is_free[row], latest_end = True, row_end
        frames.append(frame[is_free])
        frame = frame[~is_free]
    return frames


Floats = npt.NDArray[np.float64]

MAX_COLUMNS = 2_048
"""Maximum number of heat map columns; more ranks share columns."""

MAX_CELLS = 1_000_000
"""Maximum number of heat map cells; the rows with the most time are kept."""

MAX_MATRIX = 512
"""Maximum number of rows and columns of the wait matrix."""

MAX_RANKS = 12
"""Default maximum number of ranks with a timeline."""

MAX_BOXES = 250_000
"""Maximum number of boxes on the timelines; the steps with the most waiting are kept."""

_SCRIPTS = ("core.js", "state.js", "table.js", "timeline.js", "heat.js", "job.js")
_NONE = 65_535


@dataclass(frozen=True)
class JobView:
    """The content of the page.

    Attributes:
        answer: The analysis of the ranks.
        tables: The tables of the job.
        title: Title of the page.
        command: Command prefix in hints: ``nvprof-kit ranks FOLDER``.
        ranks: Ranks with a timeline; empty selects the most relevant.
    """

    answer: Ranks
    tables: JobTables
    title: str
    command: str
    ranks: Sequence[int] = ()


def job_page(view: JobView) -> bytes:
    """The page as UTF-8."""
    answer, block, texts = view.answer, Block(), Texts()
    ranks = sorted({int(rank) for rank in answer.clocks["rank"]})
    layers = _layers(answer.layers, ranks, block)
    timeline_ranks = sorted(set(view.ranks) & set(ranks)) or chosen_ranks(answer, ranks)
    timeline, note = _timeline(view, timeline_ranks, texts, block)
    names = _layer_names(answer.layers)
    data = {
        "steps": 1,
        "tree": {"name": [short_text(name) for name in names], "parent": _parents(names)},
        "layers": layers,
        "bySteps": _by_step(view.tables, ranks, block),
        "matrix": _matrix(_waiting(view), ranks, block),
        "ranks": timeline_ranks,
        "timeline": timeline,
        "texts": [short_text(text) for text in texts.numbers],
    }
    data["block"] = block.packed()
    return render(
        "job.html",
        _SCRIPTS,
        ("page.css",),
        loading=True,
        title=f"{view.title} · nvprof-kit ranks",
        name=view.title,
        command=view.command,
        facts=job_size(len(ranks), answer.steps, answer.collectives),
        verdict=answer.verdict,
        warnings=answer.warnings,
        tables=_tables(view),
        timeline_note=note,
        left_out=_left_out(view),
        held=timeline_ranks,
        has_steps=data["bySteps"] is not None,
        has_waits=data["matrix"] is not None,
        has_timeline=timeline is not None,
        replay_error=answer.replay_error,
        data=[data],
    )


def chosen_ranks(answer: Ranks, ranks: Sequence[int]) -> list[int]:
    """The ranks with a timeline: all if there are few, else late ranks, waiting ranks, and some others."""
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    late_ranks = answer.charges.groupby("rank")["wait_ns"].sum().sort_values(ascending=False).index.tolist()
    waiting_ranks = answer.matrix.groupby("waiting_rank")["wait_ns"].sum().sort_values(ascending=False).index.tolist()
    named = [] if answer.verdict.rank is None else [answer.verdict.rank]
    spread = [ranks[index] for index in np.linspace(0, len(ranks) - 1, 4).astype(int)]
    order = dict.fromkeys((*named, *late_ranks[:4], *waiting_ranks[:3], *spread, *late_ranks[4:]))
    return sorted(int(rank) for rank in list(order)[:MAX_RANKS] if rank in set(ranks))


def _left_out(view: JobView) -> list[str]:
    """What the page omits for a large job, and how to show it."""
    answer = view.answer
    if answer.replay_error is not None or not answer.collectives:
        return []
    return [
        f"the critical path and what-if: {answer.collectives:,} matched collectives are too many to be replayed; name "
        "the captures of fewer ranks, for example those of one pipeline"
    ]


# ---------------------------------------------------------------- heat maps


def _columns(ranks: Sequence[int], limit: int) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The names of the heat map columns, and the column of each rank in order."""
    each = -(-len(ranks) // limit) or 1
    of = np.arange(len(ranks)) // each
    groups = [ranks[start : start + each] for start in range(0, len(ranks), each)]
    return [str(group[0]) if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups], of


def _packed(values: Floats, block: Block) -> dict[str, Any]:
    """Rows of a heat map, each value as a fraction of the row's maximum in 65,534 steps; missing values are `_NONE`."""
    row_max = np.nanmax(np.where(np.isnan(values), 0, values), axis=1, initial=0)
    scale = np.where(row_max > 0, row_max / (_NONE - 1), 1.0)
    cells = np.where(np.isnan(values), _NONE, np.round(np.maximum(values, 0) / scale[:, None]))
    with np.errstate(all="ignore"):
        medians = np.array([np.nanmedian(row) if not np.isnan(row).all() else 0.0 for row in values])
    return {
        "cells": block.add(np.nan_to_num(cells, nan=_NONE).astype(np.int64).ravel()),
        "scale": block.add(scale.astype(np.float64)),
        "middle": block.add(medians.astype(np.float64)),
    }


def _grid(values: pd.Series[Any], where: tuple[npt.NDArray[Any], ...], shape: tuple[int, int]) -> Floats:
    """Values by row and column; the maximum if several are in one cell."""
    cells = np.full(shape, -1.0)
    np.maximum.at(cells, where, values.to_numpy(dtype=np.float64))
    cells[cells < 0] = np.nan
    return cells


def _layers(layers: pd.DataFrame, ranks: Sequence[int], block: Block) -> dict[str, Any] | None:
    """Layer and phase by rank."""
    if not len(layers):
        return None
    columns, of = _columns(ranks, MAX_COLUMNS)
    keys = layers["layer"].astype(str) + "\t" + layers["phase"].astype(str)
    total = (layers["median_ns"] + layers["idle_ns"] + layers["comm_ns"]).groupby(keys).sum()
    limit = max(MAX_CELLS // max(len(columns), 1), 1)
    costliest = set(total.sort_values(ascending=False).index[:limit])
    rows = sorted(costliest, key=_natural)
    chosen = layers[keys.isin(costliest)]
    row_of_key = {key: number for number, key in enumerate(rows)}
    row = keys[keys.isin(costliest)].map(row_of_key).to_numpy(dtype=np.int64)
    column = of[np.searchsorted(ranks, chosen["rank"].to_numpy())]
    shape = (len(rows), len(columns))
    measures = {"median_ns": "computing", "idle_ns": "idle", "comm_ns": "communication, waiting included"}
    names = [key.split("\t") for key in rows]
    return {
        "rows": [short_text(f"{layer} {phase}") for layer, phase in names],
        "tree": [short_text(f"{layer} {phase}" if layer == NO_LAYER else layer) for layer, phase in names],
        "columns": columns,
        "rank": [int(ranks[np.flatnonzero(of == index)[0]]) for index in range(len(columns))],
        "measures": [
            {"name": title, **_packed(_grid(chosen[name], (row, column), shape), block)}
            for name, title in measures.items()
            if (chosen[name] > 0).any()
        ],
        "note": f"{len(total) - len(rows):,} rows of little time are left out" if len(total) > len(rows) else "",
    }


def _by_step(tables: JobTables, ranks: Sequence[int], block: Block) -> dict[str, Any] | None:
    """Step by rank."""
    frame = tables.rank_steps()
    if not len(frame):
        return None
    columns, of = _columns(ranks, MAX_COLUMNS)
    steps = sorted({int(step) for step in frame["step"]})
    row = np.searchsorted(steps, frame["step"].to_numpy())
    column = of[np.searchsorted(ranks, frame["rank"].to_numpy())]
    measures = {
        "wait_ns": "waiting for other ranks",
        "compute_ns": "computing",
        "idle_ns": "idle",
        "length_ns": "length of the step",
    }
    shape = (len(steps), len(columns))
    return {
        "rows": [f"step {step}" for step in steps],
        "columns": columns,
        "rank": [int(ranks[np.flatnonzero(of == index)[0]]) for index in range(len(columns))],
        "measures": [
            {"name": title, **_packed(_grid(frame[name], (row, column), shape), block)}
            for name, title in measures.items()
            if (frame[name] > 0).any()
        ],
        "note": "",
    }


def _waiting(view: JobView) -> dict[str, pd.DataFrame]:
    """Who waited for whom; without the steps in which the profilers started, if there are others, and in all."""
    charges, all_waits = view.answer.charges, view.answer.matrix
    cold = sorted({int(step) for step in charges["step"][charges["cause"] == "start_up"]})
    later = view.tables.matrix(cold) if cold else all_waits
    if not cold or not len(later):
        return {"waiting": all_waits}
    return {"waiting, after the profilers' start": later, "waiting, all steps": all_waits}


def _matrix(kinds: dict[str, pd.DataFrame], ranks: Sequence[int], block: Block) -> dict[str, Any] | None:
    """The wait matrix, summed where ranks share a row or column."""
    if not any(len(matrix) for matrix in kinds.values()):
        return None
    columns, of = _columns(ranks, MAX_MATRIX)
    measures = []
    for name, matrix in kinds.items():
        sums = np.zeros((len(columns), len(columns)))
        cells = [of[np.searchsorted(ranks, matrix[key].to_numpy())] for key in ("waiting_rank", "late_rank")]
        np.add.at(sums, tuple(cells), matrix["wait_ns"].to_numpy(dtype=np.float64))
        if len(columns) == len(ranks):
            np.fill_diagonal(sums, np.nan)
        measures.append({"name": name, **_packed(sums, block)})
    note = "ranks that share a row or a column are summed" if len(columns) < len(ranks) else ""
    return {
        "rows": columns,
        "columns": columns,
        "rank": [int(ranks[np.flatnonzero(of == index)[0]]) for index in range(len(columns))],
        "measures": measures,
        "note": note,
    }


def _natural(key: str) -> list[Any]:
    """Sort key: layers by number, rows outside layers last."""
    parts: list[Any] = [key.startswith(NO_LAYER)]
    return parts + [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in re.split(r"(\d+)", key)]


def _layer_names(layers: pd.DataFrame) -> list[str]:
    pairs = sorted(set(zip(layers["layer"].astype(str), layers["phase"].astype(str), strict=True)))
    names = dict.fromkeys(f"{layer} {phase}" if layer == NO_LAYER else layer for layer, phase in pairs)
    return sorted(names, key=_natural)


def _parents(names: list[str]) -> list[int]:
    """The nearest listed ancestor of each layer; -1 for none."""
    index_of_name = {name: number for number, name in enumerate(names)}
    parents = []
    for name in names:
        path = name
        while "." in path and (path := path.rpartition(".")[0]) not in index_of_name:
            pass
        parents.append(index_of_name.get(path, -1) if path != name else -1)
    return parents


# ---------------------------------------------------------------- tables and timeline


def _tables(view: JobView) -> list[PageTable]:
    """Tables: charged waiting, what-if, critical path and clocks."""
    import pandas as pd

    answer, command = view.answer, view.command
    charges = answer.charges.rename(columns={"rank": "late_rank"})
    charges = charges.groupby(["late_rank", "cause", "layer", "phase"], sort=False)["wait_ns"].sum().reset_index()
    charges = charges.sort_values("wait_ns", ascending=False, kind="stable")
    charges = charges.assign(share=charges["wait_ns"] / max(answer.total_wait_ns, 1))
    path = answer.critical_path
    if len(path):
        path = path.groupby(["rank", "layer", "phase", "what"], sort=False)["ns"].sum().reset_index(name="time_ns")
        path = path.sort_values("time_ns", ascending=False, kind="stable")
        path = path.assign(share=path["time_ns"] / max(int(path["time_ns"].sum()), 1))
    worst = answer.clocks.sort_values("residual_ns", ascending=False, kind="stable")
    clocks = worst.assign(residual_us=pd.to_numeric(worst["residual_ns"], errors="coerce") / 1e3)
    error = f"; the unchanged graph is replayed to within {answer.replay_error or 0:.1%}"
    equals = f"milliseconds of a step if this were as fast as the median{error}"
    tables = [
        (charges, "charges", "What the waiting is charged to", "milliseconds over all steps and ranks", "charges"),
        (answer.what_if, "what-if", "What if", equals, "what-if"),
        (path, "critical-path", "Critical path across ranks", "milliseconds over all steps", "critical-path"),
        (clocks.drop(columns=["residual_ns"]), "clocks", "Clocks", "milliseconds; the worst aligned first", "clocks"),
    ]  # fmt: skip
    tables += [
        (answer.bubbles, "bubbles", "Bubbles of the pipeline", "milliseconds by step and stage", "bubbles"),
        (answer.micro_batches, "micro-batches", "Micro-batches", "milliseconds that a stage waits", "micro-batches"),
        (answer.groups, "groups", "Parallel groups", "which ranks share a communicator, and what it is for", "groups"),
    ]
    return [
        page_table(rows, name, title, about=about, command=f"{command} --view {option} --format csv")
        for rows, name, title, about, option in tables
        if rows is not None and len(rows)
    ]


def _timeline(view: JobView, ranks: Sequence[int], texts: Texts, block: Block) -> tuple[dict[str, Any] | None, str]:
    """The timelines of the selected ranks, and a sentence about omissions."""
    points, segments = view.tables.placed(ranks), view.tables.segments(ranks)
    if not len(points):
        return None, ""
    steps = _selected_steps(points, segments)
    left_out = points["step"].nunique() - len(steps)
    points = points[points["step"].isin(steps)]
    origin = int(points["a"].min())
    groups, ends = [], [int(points["e"].max())]
    for rank in ranks:
        rank_points = points[points["rank"] == rank]
        work = work_of(rank_points, segments[segments["rank"] == rank])
        work = work[work["step"].isin(steps)]
        if len(work):
            origin, ends = min(origin, int(work["start_ns"].min())), [*ends, int(work["end_ns"].max())]
        groups.append((rank, work, collectives_of(rank_points)))
    drawing = _Drawing(origin, texts, block)
    drawn = [drawing.group(*group) for group in groups]
    windows = _windows(groups, steps, origin, max(ends))
    note = f"{left_out} more steps are not on the page" if left_out else ""
    return {
        "start": origin,
        "steps": windows,
        "groups": [group for group in drawn if group["rows"]],
        "note": note,
    }, note


def _selected_steps(points: pd.DataFrame, segments: pd.DataFrame) -> list[int]:
    """The steps with boxes on the page: all, or those in which the selected ranks waited most."""
    boxes = points.groupby("step").size().mul(2).add(segments.groupby("step").size(), fill_value=0)
    boxes = boxes[boxes.index.isin(points["step"].unique())]
    waits = (points["arrival"] - points["a"]).clip(lower=0).groupby(points["step"]).sum().sort_values(ascending=False)
    selected: list[int] = []
    room = MAX_BOXES
    for step in waits.index:
        room -= int(boxes.get(step, 0))
        if room < 0 and selected:
            break
        selected.append(int(step))
    return sorted(selected)


def _windows(groups: Sequence[Any], steps: Sequence[int], origin: int, end: int) -> list[dict[str, Any]]:
    """The selectable steps: all together, then each from its first to its last event on the selected ranks."""
    windows: list[dict[str, Any]] = [
        {"step": None, "instance": None, "title": "all", "start": 0, "length": end - origin, "idle": {}}
    ]
    for step in steps:
        starts, ends = [], []
        for _, work, comm in groups:
            for frame in (work, comm):
                step_rows = frame[frame["step"] == step]
                if len(step_rows):
                    starts.append(int(step_rows["start_ns"].min()))
                    ends.append(int(step_rows["end_ns"].max()))
        if starts and step >= 0:
            window = {"start": min(starts) - origin, "length": max(ends) - min(starts)}
            windows.append({"step": int(step), "instance": None, "title": f"step {step}", **window, "idle": {}})
    return windows if len(windows) != 2 else windows[1:]


class _Drawing:
    """Adds ranks to a timeline and its columns to a block."""

    def __init__(self, origin: int, texts: Texts, block: Block) -> None:
        self._origin, self._texts, self._block = origin, texts, block

    def group(self, rank: int, work: pd.DataFrame, comm: pd.DataFrame) -> dict[str, Any]:
        """The rows of a rank: its work, its idle time, and its collectives."""
        busy = work["doing"].isin(("compute", "copy"))
        idle = work[~busy & (work["doing"] != "communication")]
        rows = []
        if busy.any():
            rows.append(self._row("work", work[busy], work["layer"][busy]))
        if len(idle):
            rows.append(self._row("stall", idle, "idle: " + idle["doing"].astype(str), layer=idle["layer"]))
        for frame in apart(comm):
            rows.append(self._row("collective", frame, frame["text"], frame["doing"], layer=frame["layer"]))
        return {"label": f"rank {rank}", "rank": rank, "rows": rows}

    def _row(
        self, kind: str, frame: pd.DataFrame, text: Any, phase: Any = None, *, layer: Any = None
    ) -> dict[str, Any]:
        start, end = (frame[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
        columns = {
            "start": self._block.add(start - self._origin, rising=True),
            "length": self._block.add(end - start),
            "text": self._block.add(self._texts.of(text)),
            "phase": self._block.add(self._texts.of(frame["phase"] if phase is None else phase)),
        }
        if layer is not None:
            columns["layer"] = self._block.add(self._texts.of(layer))
        return {"kind": kind, **columns}
