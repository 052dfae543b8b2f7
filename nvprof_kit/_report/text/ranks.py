"""Text report of the ranks of a job: verdict, waiting by rank and cause, clocks, and slow layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.fold import fold_ranked
from nvprof_kit._ranks.answer import job_size
from nvprof_kit._ranks.replay import PATH_COLUMNS
from nvprof_kit._ranks.waits import CHARGE_COLUMNS
from nvprof_kit._report.text.table import Grid, table, warning_lines
from nvprof_kit._report.text.units import Cells, percent
from nvprof_kit._result.column import Column, Columns
from nvprof_kit.issues import plural

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._ranks.answer import Ranks, RankTable

FOLD = 8
"""Maximum number of ranks with a line each; with more, only unlike ranks have one, and the rest share a line."""

_MS = Cells(1, 3)
_WAY = "--top N shows them"


def ranks_report(result: Ranks) -> list[RenderableType]:
    """The report: verdict, waiting by cause, layers, clocks, critical path and what-if."""
    top, fold = result.select.top or 10, result.select.fold
    if result.select.where:
        tables_of_layers = {name: getattr(result, name) for name in ("charges", "layers", "critical_path")}
        chosen: dict[str, Any] = dict(result.select.each(tables_of_layers))
        result = replace(result, **chosen)
    verdict = result.verdict
    style = {"critical": "bold red", "warning": "bold yellow"}.get(verdict.severity, "bold green")
    facts = " · ".join(job_size(len(result.clocks), result.steps, result.collectives))
    parts: list[RenderableType] = [Text(facts), "", Text(verdict.sentence, style), ""]
    parts += _charges(result.charges, result.steps, result.total_wait_ns, top, fold)
    tables = {
        "waits": _who_waits(result.matrix, top),
        "layers": _unlike(result.layers, top, fold),
        "groups": _groups(result.groups, top),
        "bubbles": _bubbles(result.bubbles),
        "clocks": _clocks(result.clocks),
    }
    if len(result.critical_path):
        tables["critical-path"] = _path(result.critical_path, top, fold)
        tables["what-if"] = _what_if(result.what_if, result.replay_error or 0.0)
    parts += [line for section in tables.values() for line in section]
    note = "Milliseconds. A rank waits from its kernel's start to the last rank's; all waiting is in the first table."
    return [*parts, Text(note, "dim"), *warning_lines(result.warnings)]


def _charges(charges: pd.DataFrame, steps: int, total: int, top: int, fold: bool | None) -> list[RenderableType]:
    """Waiting by charged rank and cause: the largest first, the rest in one line."""
    if not len(charges):
        return []
    keys = ["rank", "cause", "layer", "phase"]
    sums = _folded(
        charges.groupby(keys, sort=False)["wait_ns"].sum().sort_values(ascending=False), CHARGE_COLUMNS, fold
    )
    grid = table(
        [
            ("late rank", "right"),
            ("cause", "left"),
            ("layer", "path"),
            ("phase", "left"),
            ("waiting", "right"),
            ("share", "right"),
        ]
    )
    for (rank, cause, layer, phase), ns in sums.head(top).items():
        cells = (str(rank), cause, layer, phase, _MS(int(ns)), percent(ns / total) if total else "")
        grid.add_row(*cells, cost=float(ns))
    grid.way = _WAY
    remaining = sums.iloc[top:]
    if len(remaining):
        grid.add_row(
            "",
            f"{len(remaining)} more",
            "",
            "",
            _MS(int(remaining.sum())),
            percent(remaining.sum() / total) if total else "",
        )
    grid.add_section()
    grid.add_row("", "all", "", "", _MS(total), "100.0 %" if total else "", style="bold")
    return [
        Text(f"Waiting in collectives, over {plural(steps, 'step')} and all ranks, by late rank and cause", "bold"),
        grid,
        "",
    ]


def _who_waits(matrix: pd.DataFrame, top: int) -> list[RenderableType]:
    """Who waited for whom: a matrix if there are few ranks, else the late ranks and the time others waited for each."""
    if not len(matrix):
        return []
    ranks = sorted(set(matrix["waiting_rank"]) | set(matrix["late_rank"]))
    if len(ranks) <= FOLD:
        grid = table([("waits ↓  for →", "right"), *((str(rank), "right") for rank in ranks)])
        cells = matrix.set_index(["waiting_rank", "late_rank"])["wait_ns"]
        for waiting in ranks:
            grid.add_row(
                str(waiting),
                *("·" if waiting == other else _MS(int(cells.get((waiting, other), 0))) for other in ranks),
            )
        return [Text("Who waited for whom", "bold"), grid, ""]
    by_late_rank = (
        matrix.groupby("late_rank")["wait_ns"].agg(["sum", "size", "max"]).sort_values("sum", ascending=False)
    )
    grid = table([("late rank", "right"), ("waiting", "right"), ("ranks that waited", "right"), ("longest", "right")])
    for rank, row in by_late_rank.head(top).iterrows():
        cells = (str(rank), _MS(int(row["sum"])), f"{int(row['size']):,}", _MS(int(row["max"])))
        grid.add_row(*cells, cost=float(row["sum"]))
    grid.way = _WAY
    remaining = by_late_rank.iloc[top:]
    if len(remaining):
        grid.add_row(f"{len(remaining)} more", _MS(int(remaining["sum"].sum())), "", _MS(int(remaining["max"].max())))
    return [Text("Whom the others waited for", "bold"), grid, ""]


def _folded(sums: pd.Series[int], columns: Columns, fold: bool | None) -> pd.Series[int]:
    """Sums by layer and other keys, with equal blocks in one."""
    keys = list(sums.index.names)
    rows = fold_ranked(sums.reset_index(), columns, str(sums.name), fold)
    folded_sums: pd.Series[int] = rows.set_index(keys)[sums.name]
    return folded_sums


def _unlike(layers: pd.DataFrame, top: int, fold: bool | None) -> list[RenderableType]:
    """Layers by rank: those that differ most if there are few ranks, else only ranks unlike their equals."""
    ranks = sorted(layers["rank"].unique())
    if len(ranks) <= FOLD:
        wide = layers.pivot_table(index=["layer", "phase"], columns="rank", values="median_ns", aggfunc="sum")
        wide = _folded_ranks(wide, fold)
        gap = (wide.max(axis=1) - wide.min(axis=1)).sort_values(ascending=False)
        grid = table(
            [
                ("layer", "path"),
                ("phase", "left"),
                *((f"rank {rank}", "right") for rank in ranks),
                ("slowest", "right"),
                ("by", "right"),
            ]
        )
        for key in gap[gap > 0].head(top).index:
            row = wide.loc[key]
            cells = ("" if row[rank] != row[rank] else _MS(int(row[rank])) for rank in ranks)
            grid.add_row(*key, *cells, str(row.idxmax()), _MS(int(gap[key])))
        grid.way = _WAY
        return [Text("Layers whose ranks differ most: computing, median over steps", "bold"), grid, ""]
    unlike = layers[layers["unlike"]].sort_values("excess_ns", ascending=False)
    if not len(unlike):
        return [Text(f"No rank computes unlike its equals in any layer ({len(ranks)} ranks).", "bold"), ""]
    grid = table(
        [
            ("layer", "path"),
            ("phase", "left"),
            ("rank", "right"),
            ("median", "right"),
            ("its equals", "right"),
            ("excess", "right"),
        ]
    )
    for row in unlike.head(top).to_dict("records"):
        grid.add_row(
            row["layer"],
            row["phase"],
            str(row["rank"]),
            _MS(row["median_ns"]),
            _MS(row["peers_ns"]),
            _MS(row["excess_ns"]),
        )
    title = f"Ranks unlike their equals: {unlike['rank'].nunique()} of {len(ranks)}"
    grid.beyond, grid.hidden_note = max(len(unlike) - top, 0), "… and {} more; csv and json have them all"
    return [Text(title, "bold"), grid, ""]


def _folded_ranks(wide: pd.DataFrame, fold: bool | None) -> pd.DataFrame:
    """A column for each rank, with equal blocks in one row; equal ones have the same slowest rank."""
    gap = wide.max(axis=1) - wide.min(axis=1)
    rows = wide.assign(by_ns=gap, slowest=wide.idxmax(axis=1)).rename(columns=str).reset_index()
    names = {str(rank): rank for rank in wide.columns}
    folded = fold_ranked(rows, {"slowest": Column("rank", fold="key")}, "by_ns", fold, tuple(names))
    by_rank: pd.DataFrame = folded.rename(columns=names).set_index(["layer", "phase"])[list(names.values())]
    return by_rank


def _groups(groups: pd.DataFrame | None, top: int) -> list[RenderableType]:
    """The communicators and their purpose; one line per kind and size."""
    if groups is None or not len(groups):
        return []
    grid = table(
        [("parallel", "left"), ("groups", "right"), ("of ranks", "right"), ("for example", "left"), ("does", "left")]
    )
    for (parallel, size), rows in list(groups.groupby(["parallel", "size"], sort=True))[:top]:
        kinds = ", ".join(sorted({kind for kinds_text in rows["kinds"] for kind in kinds_text.split(", ")}))
        grid.add_row(str(parallel), str(len(rows)), str(size), str(rows["ranks"].iloc[0]), kinds)
    return [Text("Parallel groups", "bold"), grid, ""]


def _bubbles(bubbles: pd.DataFrame | None) -> list[RenderableType]:
    """The bubble of each pipeline stage, averaged over steps and the stage's ranks."""
    if bubbles is None or not len(bubbles):
        return []
    heads = ("stage", "ranks", "step", "busy", "sends and receives", "host", "other", "bubble", "share")
    grid = table([(heading, "right") for heading in heads])
    times = ["step_ns", "busy_ns", "wait_ns", "host_ns", "other_ns", "bubble_ns"]
    for stage, stage_rows in bubbles.groupby("stage", sort=True):
        means = stage_rows[times].mean()
        share = percent(float(means["bubble_ns"] / max(means["step_ns"], 1)))
        grid.add_row(str(stage), str(stage_rows["rank"].nunique()), *(_MS(round(means[name])) for name in times), share)
    ideal = f"Equal stages could not go below {percent(float(bubbles['ideal_share'].median()))} with GPipe or 1F1B."
    return [Text("Bubbles of the pipeline's stages, mean over steps", "bold"), grid, Text(ideal, "dim"), ""]


def _clocks(clocks: pd.DataFrame) -> list[RenderableType]:
    """The clocks; if there are many ranks, the quality of their alignment and the worst ones."""
    import pandas as pd

    if len(clocks) <= FOLD:
        rows = clocks
        title = "Clocks"
    else:
        rows = clocks.sort_values("residual_ns", ascending=False).head(3)
        residual = clocks["residual_ns"].median()
        aligned = f"{clocks['offset_ns'].notna().sum():,} of {len(clocks):,} aligned"
        title = f"Clocks: {aligned}, median residual {residual / 1e3:,.1f} µs; the worst"
    grid = table(
        [("rank", "right"), ("offset", "right"), ("drift", "right"), ("residual", "right"), ("collectives", "right")]
    )
    for row in rows.to_dict("records"):
        if pd.notna(row["offset_ns"]):
            grid.add_row(
                str(row["rank"]),
                f"{row['offset_ns'] / 1e6:,.3f} ms",
                f"{row['drift_ppm']:.2f} ppm" if row["drift_ppm"] else "none seen",
                f"{row['residual_ns'] / 1e3:,.1f} µs",
                str(row["matched"]),
            )
        else:
            grid.add_row(str(row["rank"]), "not aligned", "", "", "0")
    return [Text(title, "bold"), grid, ""]


def _path(path: pd.DataFrame, top: int, fold: bool | None) -> list[RenderableType]:
    """The critical path over all steps, the longest parts first."""
    keys = ["rank", "layer", "phase", "what"]
    sums = _folded(path.groupby(keys, sort=False)["ns"].sum().sort_values(ascending=False), PATH_COLUMNS, fold)
    total = max(int(sums.sum()), 1)
    grid = table(
        [
            ("rank", "right"),
            ("layer", "path"),
            ("phase", "left"),
            ("what", "left"),
            ("time", "right"),
            ("share", "right"),
        ]
    )
    for key, ns in sums.head(top).items():
        cells = (*map(str, key if isinstance(key, tuple) else (key,)), _MS(int(ns)), percent(ns / total))
        grid.add_row(*cells, cost=float(ns))
    grid.way = _WAY
    remaining = int(sums.iloc[top:].sum())
    if remaining:
        grid.add_row("", f"{len(sums) - top} more", "", "", _MS(remaining), percent(remaining / total))
    return [Text("Critical path across ranks, all steps", "bold"), grid, ""]


def _what_if(changes: pd.DataFrame, error: float) -> list[RenderableType]:
    """The step time with each change, and the replay error of the unchanged graph."""
    grid = table([("as fast as the median", "left"), ("step", "right"), ("saved", "right"), ("share", "right")])
    for row in changes.to_dict("records"):
        grid.add_row(row["what"], _MS(row["step_ns"]), _MS(row["saved_ns"]), percent(row["saved_share"]))
    measured = _MS(int(changes["measured_ns"].iloc[0]))
    note = f"A replay without changes gives the measured mean step of {measured} ms to within {percent(error)}."
    bad = "" if error <= 0.02 else " That is more than 2 %: do not trust the savings."
    return [Text("What if", "bold"), grid, Text(note + bad, "yellow" if bad else "dim"), ""]


def rank_table(result: RankTable) -> list[RenderableType]:
    """The first rows of a job's table, and the number of omitted rows."""
    frame, top = result.to_frame(), result.select.top or 20
    grid = table_of(frame.head(top))
    grid.beyond, grid.hidden_note = max(len(frame) - top, 0), "… and {} more; --top N shows them"
    return [grid]


def table_of(frame: pd.DataFrame) -> Grid:
    """Any table of a job, with times in milliseconds."""
    times = [name for name in frame.columns if str(name).endswith("_ns")]
    grid = table(
        [
            (str(name).removesuffix("_ns"), "right" if frame[name].dtype.kind in "iuf" else "left")
            for name in frame.columns
        ]
    )
    for row in frame.to_dict("records"):
        grid.add_row(*(_cell(value, name in times) for name, value in row.items()))
    return grid


def _cell(value: object, time: bool) -> str:
    if value is None or str(value) in ("nan", "<NA>"):
        return ""
    if time and isinstance(value, (int, float)):
        return _MS(int(value))
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
