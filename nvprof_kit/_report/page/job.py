"""The page of a job: verdict, heat maps by rank, wait matrix, timelines of selected ranks, and what-if."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.layers.tree import ModelTree, parents_of
from nvprof_kit._ranks.answer import Ranks, job_size
from nvprof_kit._report.page.table import PageTable, page_table
from nvprof_kit._report.page.template import render, short_text
from nvprof_kit._report.page.timeline import Drawing, ShownStep
from nvprof_kit._report.text.ranks import CHARGED_TO, ON_THE_PATH, summed
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
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
    length = segments["ns"].to_numpy(dtype=np.int64)
    reached = np.cumsum(length)
    number = segments["segment"].to_numpy()
    segment = np.concatenate([points["ready_segment"], points["end_segment"][points["gates"]]]).astype(np.int64)
    when = np.concatenate([points["a"] - points["queued_ns"], points["e"][points["gates"]]]).astype(np.int64)
    position = np.searchsorted(number, segment, side="right") - 1
    usable = (segment >= 0) & (position >= 0)
    if not usable.any():
        return segments.iloc[:0].reindex(columns=_WORK_COLUMNS)
    at, time = reached[position[usable]], when[usable]
    order = np.lexsort((time, at))
    at, first = np.unique(at[order], return_index=True)
    time = np.maximum.accumulate(time[order][first])
    at = np.concatenate(([0], at, reached[-1:]))  # before the first and behind the last point time goes on as it does
    time = np.concatenate((time[:1] - at[1], time, time[-1:] + at[-1] - at[-2]))
    starts, ends = (np.interp(positions, at, time).astype(np.int64) for positions in (reached - length, reached))
    pieces = segments[["step", "doing", "layer", "phase"]].assign(start_ns=starts, end_ns=ends)
    return pieces[pieces["end_ns"] > pieces["start_ns"]]


def collectives_of(points: pd.DataFrame) -> pd.DataFrame:
    """The waiting and transfers of one rank's collectives: start_ns, end_ns, step, doing, text.

    Args:
        points: With a, e, arrival (the last rank's), late_rank, sort, step.
    """
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
    return both[both["end_ns"] > both["start_ns"]].sort_values("start_ns", kind="stable", ignore_index=True)


def apart(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Split rows into as few frames without overlaps as possible; the rows beyond `MAX_FRAMES` are dropped."""
    latest_ends: list[int] = []
    numbers = []
    for start, end in zip(frame["start_ns"].tolist(), frame["end_ns"].tolist(), strict=True):
        number = next((row for row, latest in enumerate(latest_ends) if latest <= start), len(latest_ends))
        latest_ends[number : number + 1] = [end]
        numbers.append(number)
    return [frame[np.array(numbers) == number] for number in range(min(len(latest_ends), MAX_FRAMES))]


MAX_FRAMES = 4
"""Maximum number of rows for the collectives of a rank that run at the same time."""

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

_OF_LAYERS = {"median_ns": "computing", "idle_ns": "idle", "comm_ns": "communication, waiting included"}
_OF_STEPS = {"wait_ns": "waiting for other ranks", "compute_ns": "computing", "idle_ns": "idle"}
_OF_STEPS |= {"length_ns": "length of the step"}

_SCRIPTS = ("core.js", "state.js", "table.js", "timeline.js", "heat.js", "job.js")
_NONE = 65_535


def job_page(answer: Ranks, tables: JobTables, title: str, command: str, timeline_ranks: Sequence[int] = ()) -> bytes:
    """The page as UTF-8.

    Args:
        answer: The analysis of the ranks.
        tables: The tables of the job.
        title: Title of the page.
        command: Command prefix in hints: ``nvprof-kit ranks FOLDER``.
        timeline_ranks: Ranks with a timeline; empty selects the most relevant.
    """
    drawing = Drawing()
    ranks = sorted({int(rank) for rank in answer.clocks["rank"]})
    heat = _Heat(ranks, drawing, MAX_COLUMNS)
    timeline_ranks = sorted(set(timeline_ranks) & set(ranks)) or chosen_ranks(answer, ranks)
    names = dict.fromkeys(map(_place, *(answer.layers[name].astype(str) for name in ("layer", "phase"))))
    layers = sorted(names, key=_natural)
    tree = ModelTree(tuple(layers), tuple(parents_of(layers, ()).values()))
    by_step = tables.frame("rank_steps").sort_values("step", kind="stable")
    data = {
        "steps": 1,
        "tree": {"name": [short_text(layer) for layer in layers], "parent": tree.parent.tolist()},
        "layers": _layers(answer.layers, heat),
        "bySteps": heat.map(by_step.assign(row="step " + by_step["step"].astype(str)), _OF_STEPS),
        "matrix": _matrix(answer, tables, ranks, drawing),
        "ranks": timeline_ranks,
        "timeline": _timeline(tables, timeline_ranks, drawing),
        "texts": list(map(short_text, drawing.texts)),
    }
    data["block"] = drawing.packed()
    variables = {"title": f"{title} · nvprof-kit ranks", "name": title, "command": command, "answer": answer}
    variables |= {"facts": job_size(len(ranks), answer.steps, answer.collectives), "tables": _tables(answer, command)}
    lacks_replay = answer.replay_error is None and answer.collectives
    variables["left_out"] = [Issue.of("no-replay", count=answer.collectives)] if lacks_replay else []
    return render("job.html", _SCRIPTS, ("page.css",), loading=True, data=[data], **variables)


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


# ---------------------------------------------------------------- heat maps


class _Heat:
    """Heat maps by rank; where there are many, ranks share columns."""

    def __init__(self, ranks: Sequence[int], drawing: Drawing, limit: int) -> None:
        each = -(-len(ranks) // limit) or 1
        groups = [ranks[start : start + each] for start in range(0, len(ranks), each)]
        self.columns = [str(group[0]) if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups]
        self.first = [int(group[0]) for group in groups]
        self.column_of_rank = {rank: number for number, group in enumerate(groups) for rank in group}
        self._drawing = drawing

    def map(self, frame: pd.DataFrame, measures: Mapping[str, str], note: str = "") -> dict[str, Any] | None:
        """A heat map; of several values in a cell the largest.

        Args:
            frame: ``row``, ``rank`` and the measures; the order of rows is that on the page.
            measures: The title of each measure; those that are nowhere above zero are left out.
            note: What is left out.
        """
        if not len(frame):
            return None
        rows = frame["row"].unique()
        cell = [frame["row"], frame["rank"].map(self.column_of_rank)]
        measured = {
            title: frame[name].groupby(cell).max().unstack().reindex(index=rows, columns=range(len(self.columns)))
            for name, title in measures.items()
            if (frame[name] > 0).any()
        }
        drawn = [self.measure(title, values.to_numpy(dtype=np.float64)) for title, values in measured.items()]
        return self.parts([short_text(row) for row in rows], drawn, note)

    def parts(self, rows: list[str], measures: list[dict[str, Any]], note: str) -> dict[str, Any]:
        """A heat map as the page's script reads it."""
        return {"rows": rows, "columns": self.columns, "rank": self.first, "measures": measures, "note": note}

    def measure(self, title: str, values: Floats) -> dict[str, Any]:
        """The cells, each as a fraction of its row's maximum in 65,534 steps; missing values are `_NONE`."""
        row_max = np.nanmax(np.where(np.isnan(values), 0, values), axis=1, initial=0)
        scale = np.where(row_max > 0, row_max / (_NONE - 1), 1.0)
        cells = np.where(np.isnan(values), _NONE, np.round(np.maximum(values, 0) / scale[:, None]))
        medians = [np.nanmedian(row) if not np.isnan(row).all() else 0.0 for row in values]
        numbers = np.nan_to_num(cells, nan=_NONE).astype(np.int64).ravel()
        columns = {"cells": numbers, "scale": scale, "middle": np.array(medians)}
        return {"name": title, **{name: self._drawing.add(column) for name, column in columns.items()}}


def _layers(layers: pd.DataFrame, heat: _Heat) -> dict[str, Any] | None:
    """Layer and phase by rank: the costliest rows."""
    keys = layers["layer"].astype(str) + "\t" + layers["phase"].astype(str)
    total = (layers["median_ns"] + layers["idle_ns"] + layers["comm_ns"]).groupby(keys).sum()
    limit = max(MAX_CELLS // max(len(heat.columns), 1), 1)
    rows = sorted(total.sort_values(ascending=False).index[:limit], key=_natural)
    order = keys.map({key: number for number, key in enumerate(rows)})
    chosen = layers.assign(row=keys.str.replace("\t", " "), order=order).dropna(subset="order").sort_values("order")
    note = f"{len(total) - len(rows):,} rows of little time are left out" if len(total) > len(rows) else ""
    drawn = heat.map(chosen, _OF_LAYERS, note)
    return drawn and {**drawn, "tree": [short_text(_place(*key.split("\t"))) for key in rows]}


def _matrix(answer: Ranks, tables: JobTables, ranks: Sequence[int], drawing: Drawing) -> dict[str, Any] | None:
    """Who waited for whom, summed where ranks share a row or column; without the steps in which the profilers started,
    if there are others, and in all.
    """
    charges, kinds = answer.charges, {"waiting": answer.matrix}
    cold = sorted({int(step) for step in charges["step"][charges["cause"] == "start_up"]})
    if cold and len(later := tables.matrix(cold)):
        kinds = {"waiting, after the profilers' start": later, "waiting, all steps": answer.matrix}
    if not any(len(matrix) for matrix in kinds.values()):
        return None
    heat, measures = _Heat(ranks, drawing, MAX_MATRIX), []
    shares = len(heat.columns) < len(ranks)
    for name, matrix in kinds.items():
        sums = np.zeros((len(heat.columns), len(heat.columns)))
        cells = tuple(matrix[key].map(heat.column_of_rank).to_numpy() for key in ("waiting_rank", "late_rank"))
        np.add.at(sums, cells, matrix["wait_ns"].to_numpy(dtype=np.float64))
        if not shares:
            np.fill_diagonal(sums, np.nan)
        measures.append(heat.measure(name, sums))
    return heat.parts(heat.columns, measures, "ranks that share a row or a column are summed" if shares else "")


def _place(layer: str, phase: str) -> str:
    return f"{layer} {phase}" if layer == NO_LAYER else layer


def _natural(key: str) -> list[Any]:
    """Sort key: layers by number, rows outside layers last."""
    parts: list[Any] = [key.startswith(NO_LAYER)]
    return parts + [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in re.split(r"(\d+)", key)]


# ---------------------------------------------------------------- tables and timeline


def _tables(answer: Ranks, command: str) -> list[PageTable]:
    """Tables: charged waiting, what-if, critical path, clocks, bubbles and groups."""
    charges = summed(answer.charges, "wait_ns", CHARGED_TO).rename_axis(index={"rank": "late_rank"}).reset_index()
    charges = charges.assign(share=charges["wait_ns"] / max(answer.total_wait_ns, 1))
    path = answer.critical_path
    if len(path):  # else nothing was replayed
        path = summed(path, "ns", ON_THE_PATH).rename("time_ns").reset_index()
        path = path.assign(share=path["time_ns"] / max(int(path["time_ns"].sum()), 1))
    clocks = answer.clocks.sort_values("residual_ns", ascending=False, kind="stable")
    clocks = clocks.assign(residual_us=pd.to_numeric(clocks["residual_ns"], errors="coerce") / 1e3)
    error = f"; the unchanged graph is replayed to within {answer.replay_error or 0:.1%}"
    equals = f"milliseconds of a step if this were as fast as the median{error}"
    tables = {
        "charges": (charges, "What the waiting is charged to", "milliseconds over all steps and ranks"),
        "what-if": (answer.what_if, "What if", equals),
        "critical-path": (path, "Critical path across ranks", "milliseconds over all steps"),
        "clocks": (clocks.drop(columns="residual_ns"), "Clocks", "milliseconds; the worst aligned first"),
        "bubbles": (answer.bubbles, "Bubbles of the pipeline", "milliseconds by step and stage"),
        "micro-batches": (answer.micro_batches, "Micro-batches", "milliseconds that a stage waits"),
        "groups": (answer.groups, "Parallel groups", "which ranks share a communicator, and what it is for"),
    }
    csv = "{} --view {} --format csv".format
    return [
        page_table(rows, answer.columns[f"ranks-{name}"], name, title, about, command=csv(command, name))
        for name, (rows, title, about) in tables.items()
        if len(rows)
    ]


def _timeline(tables: JobTables, ranks: Sequence[int], drawing: Drawing) -> dict[str, Any] | None:
    """The timelines of the selected ranks, and a sentence about omissions."""
    points, segments = tables.points(ranks), tables.segments(ranks)
    points = points[points["arrival"].notna()].astype({"arrival": "int64", "late_rank": "int64"})
    if not len(points):
        return None
    # the steps with boxes on the page: all, or those in which the selected ranks waited most
    boxes = points.groupby("step").size().mul(2).add(segments.groupby("step").size(), fill_value=0)
    waits = (points["arrival"] - points["a"]).clip(lower=0).groupby(points["step"]).sum().sort_values(ascending=False)
    fitting = int((boxes.reindex(waits.index).cumsum() <= MAX_BOXES).sum())
    steps = sorted(map(int, waits.index[: max(fitting, 1)]))
    left_out = len(waits) - len(steps)
    both = []
    for rank in ranks:
        rank_points = points[points["rank"] == rank]
        work = work_of(rank_points, segments[segments["rank"] == rank])
        both += [work.assign(rank=rank), collectives_of(rank_points).assign(rank=rank)]
    pieces = pd.concat(both, ignore_index=True)
    pieces = pieces[pieces["step"].isin(steps)]
    origin = int(pieces["start_ns"].min())
    starts, ends = (pieces.groupby("step")[name].agg(how) for name, how in (("start_ns", "min"), ("end_ns", "max")))
    windows = [
        ShownStep(None, step, f"step {step}", int(starts[step]), int(ends[step]), {})
        for step in steps
        if step >= 0 and step in starts
    ]
    if len(windows) != 1:
        windows.insert(0, ShownStep(None, None, "all", origin, int(pieces["end_ns"].max()), {}))
    groups = []
    for number, of_rank in pieces.groupby("rank", sort=True):
        activity = of_rank["doing"]
        is_work, is_collective = activity.isin(("compute", "copy")), activity.isin((WAITING, TRANSFER))
        idle = of_rank[~is_work & ~is_collective & (activity != "communication")]
        frames = [
            ("work", of_rank[is_work].assign(text=of_rank["layer"])),
            ("stall", idle.assign(text="idle: " + idle["doing"].astype(str))),
            *(("collective", frame) for frame in apart(of_rank[is_collective].assign(phase=activity))),
        ]
        names = {"text": "text", "phase": "phase", "layer": "layer"}
        rows = [drawing.row(kind, frame, origin, names) for kind, frame in frames if len(frame)]
        groups.append({"label": f"rank {number}", "rank": number, "rows": rows})
    note = f"{left_out} more steps are not on the page" if left_out else ""
    return {"start": origin, "steps": [window.drawn(origin) for window in windows], "groups": groups, "note": note}
