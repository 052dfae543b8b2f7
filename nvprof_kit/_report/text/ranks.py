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


def ranks_report(found: Ranks) -> list[RenderableType]:
    """The report: verdict, waiting by cause, layers, clocks, critical path and what-if."""
    top, fold = found.top, found.select.fold
    if found.select.where:
        tables_of_layers = {name: getattr(found, name) for name in ("charges", "layers", "critical_path")}
        chosen: dict[str, Any] = dict(found.select.each(tables_of_layers))
        found = replace(found, **chosen)
    verdict = found.verdict
    style = {"critical": "bold red", "warning": "bold yellow"}.get(verdict.severity, "bold green")
    facts = " · ".join(job_size(len(found.clocks), found.steps, found.collectives))
    parts: list[RenderableType] = [Text(facts), "", Text(verdict.sentence, style), ""]
    parts += _charges(found.charges, found.steps, found.total_wait_ns, top, fold)
    tables = {
        "waits": _who_waits(found.matrix, top),
        "layers": _unlike(found.layers, top, fold),
        "groups": _groups(found.groups, top),
        "bubbles": _bubbles(found.bubbles),
        "clocks": _clocks(found.clocks),
    }
    if len(found.critical_path):
        tables["critical-path"] = _path(found.critical_path, top, fold)
        tables["what-if"] = _what_if(found.what_if, found.replay_error or 0.0)
    parts += [part for made in tables.values() for part in made]
    note = "Milliseconds. A rank waits from its kernel's start to the last rank's; all waiting is in the first table."
    return [*parts, Text(note, "dim"), *warning_lines(found.warnings)]


def _charges(charges: pd.DataFrame, steps: int, total: int, top: int, fold: bool | None) -> list[RenderableType]:
    """Waiting by charged rank and cause: the largest first, the rest in one line."""
    if not len(charges):
        return []
    keys = ["rank", "cause", "layer", "phase"]
    sums = _folded(
        charges.groupby(keys, sort=False)["wait_ns"].sum().sort_values(ascending=False), CHARGE_COLUMNS, fold
    )
    made = table(
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
        made.add_row(*cells, cost=float(ns))
    made.way = _WAY
    rest = sums.iloc[top:]
    if len(rest):
        made.add_row(
            "", f"{len(rest)} more", "", "", _MS(int(rest.sum())), percent(rest.sum() / total) if total else ""
        )
    made.add_section()
    made.add_row("", "all", "", "", _MS(total), "100.0 %" if total else "", style="bold")
    return [
        Text(f"Waiting in collectives, over {plural(steps, 'step')} and all ranks, by late rank and cause", "bold"),
        made,
        "",
    ]


def _who_waits(matrix: pd.DataFrame, top: int) -> list[RenderableType]:
    """Who waited for whom: a matrix if there are few ranks, else the late ranks and the time others waited for each."""
    if not len(matrix):
        return []
    ranks = sorted(set(matrix["waiting_rank"]) | set(matrix["late_rank"]))
    if len(ranks) <= FOLD:
        made = table([("waits ↓  for →", "right"), *((str(rank), "right") for rank in ranks)])
        cells = matrix.set_index(["waiting_rank", "late_rank"])["wait_ns"]
        for one in ranks:
            made.add_row(str(one), *("·" if one == other else _MS(int(cells.get((one, other), 0))) for other in ranks))
        return [Text("Who waited for whom", "bold"), made, ""]
    late = matrix.groupby("late_rank")["wait_ns"].agg(["sum", "size", "max"]).sort_values("sum", ascending=False)
    made = table([("late rank", "right"), ("waiting", "right"), ("ranks that waited", "right"), ("longest", "right")])
    for rank, row in late.head(top).iterrows():
        cells = (str(rank), _MS(int(row["sum"])), f"{int(row['size']):,}", _MS(int(row["max"])))
        made.add_row(*cells, cost=float(row["sum"]))
    made.way = _WAY
    rest = late.iloc[top:]
    if len(rest):
        made.add_row(f"{len(rest)} more", _MS(int(rest["sum"].sum())), "", _MS(int(rest["max"].max())))
    return [Text("Whom the others waited for", "bold"), made, ""]


def _folded(sums: pd.Series[int], columns: Columns, fold: bool | None) -> pd.Series[int]:
    """Sums by layer and other keys, with equal blocks in one."""
    keys = list(sums.index.names)
    rows = fold_ranked(sums.reset_index(), columns, str(sums.name), fold)
    made: pd.Series[int] = rows.set_index(keys)[sums.name]
    return made


def _unlike(layers: pd.DataFrame, top: int, fold: bool | None) -> list[RenderableType]:
    """Layers by rank: those that differ most if there are few ranks, else only ranks unlike their equals."""
    ranks = sorted(layers["rank"].unique())
    if len(ranks) <= FOLD:
        wide = layers.pivot_table(index=["layer", "phase"], columns="rank", values="median_ns", aggfunc="sum")
        wide = _folded_ranks(wide, fold)
        gap = (wide.max(axis=1) - wide.min(axis=1)).sort_values(ascending=False)
        made = table(
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
            made.add_row(*key, *cells, str(row.idxmax()), _MS(int(gap[key])))
        made.way = _WAY
        return [Text("Layers whose ranks differ most: computing, median over steps", "bold"), made, ""]
    odd = layers[layers["unlike"]].sort_values("excess_ns", ascending=False)
    if not len(odd):
        return [Text(f"No rank computes unlike its equals in any layer ({len(ranks)} ranks).", "bold"), ""]
    made = table(
        [
            ("layer", "path"),
            ("phase", "left"),
            ("rank", "right"),
            ("median", "right"),
            ("its equals", "right"),
            ("excess", "right"),
        ]
    )
    for row in odd.head(top).to_dict("records"):
        made.add_row(
            row["layer"],
            row["phase"],
            str(row["rank"]),
            _MS(row["median_ns"]),
            _MS(row["peers_ns"]),
            _MS(row["excess_ns"]),
        )
    title = f"Ranks unlike their equals: {odd['rank'].nunique()} of {len(ranks)}"
    made.beyond, made.hidden_note = max(len(odd) - top, 0), "… and {} more; csv and json have them all"
    return [Text(title, "bold"), made, ""]


def _folded_ranks(wide: pd.DataFrame, fold: bool | None) -> pd.DataFrame:
    """A column for each rank, with equal blocks in one row; equal ones have the same slowest rank."""
    gap = wide.max(axis=1) - wide.min(axis=1)
    rows = wide.assign(by_ns=gap, slowest=wide.idxmax(axis=1)).rename(columns=str).reset_index()
    names = {str(rank): rank for rank in wide.columns}
    found = fold_ranked(rows, {"slowest": Column("rank", fold="key")}, "by_ns", fold, tuple(names)).rename(
        columns=names
    )
    made: pd.DataFrame = found.set_index(["layer", "phase"])[list(names.values())]
    return made


def _groups(groups: pd.DataFrame | None, top: int) -> list[RenderableType]:
    """The communicators and their purpose; one line per kind and size."""
    if groups is None or not len(groups):
        return []
    made = table(
        [("parallel", "left"), ("groups", "right"), ("of ranks", "right"), ("for example", "left"), ("does", "left")]
    )
    for (parallel, size), mine in list(groups.groupby(["parallel", "size"], sort=True))[:top]:
        kinds = ", ".join(sorted({kind for listed in mine["kinds"] for kind in listed.split(", ")}))
        made.add_row(str(parallel), str(len(mine)), str(size), str(mine["ranks"].iloc[0]), kinds)
    return [Text("Parallel groups", "bold"), made, ""]


def _bubbles(bubbles: pd.DataFrame | None) -> list[RenderableType]:
    """The bubble of each pipeline stage, averaged over steps and the stage's ranks."""
    if bubbles is None or not len(bubbles):
        return []
    heads = ("stage", "ranks", "step", "busy", "sends and receives", "host", "other", "bubble", "share")
    made = table([(head, "right") for head in heads])
    times = ["step_ns", "busy_ns", "wait_ns", "host_ns", "other_ns", "bubble_ns"]
    for stage, mine in bubbles.groupby("stage", sort=True):
        means = mine[times].mean()
        share = percent(float(means["bubble_ns"] / max(means["step_ns"], 1)))
        made.add_row(str(stage), str(mine["rank"].nunique()), *(_MS(round(means[name])) for name in times), share)
    ideal = f"Equal stages could not go below {percent(float(bubbles['ideal_share'].median()))} with GPipe or 1F1B."
    return [Text("Bubbles of the pipeline's stages, mean over steps", "bold"), made, Text(ideal, "dim"), ""]


def _clocks(clocks: pd.DataFrame) -> list[RenderableType]:
    """The clocks; if there are many ranks, the quality of their alignment and the worst ones."""
    import pandas as pd

    if len(clocks) <= FOLD:
        shown = clocks
        title = "Clocks"
    else:
        shown = clocks.sort_values("residual_ns", ascending=False).head(3)
        middle = clocks["residual_ns"].median()
        aligned = f"{clocks['offset_ns'].notna().sum():,} of {len(clocks):,} aligned"
        title = f"Clocks: {aligned}, median residual {middle / 1e3:,.1f} µs; the worst"
    made = table(
        [("rank", "right"), ("offset", "right"), ("drift", "right"), ("residual", "right"), ("collectives", "right")]
    )
    for row in shown.to_dict("records"):
        if pd.notna(row["offset_ns"]):
            made.add_row(
                str(row["rank"]),
                f"{row['offset_ns'] / 1e6:,.3f} ms",
                f"{row['drift_ppm']:.2f} ppm" if row["drift_ppm"] else "none seen",
                f"{row['residual_ns'] / 1e3:,.1f} µs",
                str(row["matched"]),
            )
        else:
            made.add_row(str(row["rank"]), "not aligned", "", "", "0")
    return [Text(title, "bold"), made, ""]


def _path(path: pd.DataFrame, top: int, fold: bool | None) -> list[RenderableType]:
    """The critical path over all steps, the longest parts first."""
    keys = ["rank", "layer", "phase", "what"]
    sums = _folded(path.groupby(keys, sort=False)["ns"].sum().sort_values(ascending=False), PATH_COLUMNS, fold)
    total = max(int(sums.sum()), 1)
    made = table(
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
        made.add_row(*cells, cost=float(ns))
    made.way = _WAY
    rest = int(sums.iloc[top:].sum())
    if rest:
        made.add_row("", f"{len(sums) - top} more", "", "", _MS(rest), percent(rest / total))
    return [Text("Critical path across ranks, all steps", "bold"), made, ""]


def _what_if(changes: pd.DataFrame, error: float) -> list[RenderableType]:
    """The step time with each change, and the replay error of the unchanged graph."""
    made = table([("as fast as the median", "left"), ("step", "right"), ("saved", "right"), ("share", "right")])
    for row in changes.to_dict("records"):
        made.add_row(row["what"], _MS(row["step_ns"]), _MS(row["saved_ns"]), percent(row["saved_share"]))
    measured = _MS(int(changes["measured_ns"].iloc[0]))
    note = f"A replay without changes gives the measured mean step of {measured} ms to within {percent(error)}."
    bad = "" if error <= 0.02 else " That is more than 2 %: do not trust the savings."
    return [Text("What if", "bold"), made, Text(note + bad, "yellow" if bad else "dim"), ""]


def rank_table(result: RankTable) -> list[RenderableType]:
    """The first rows of a job's table, and the number of omitted rows."""
    frame, top = result.to_frame(), result.top
    made = table_of(frame.head(top))
    made.beyond, made.hidden_note = max(len(frame) - top, 0), "… and {} more; --top N shows them"
    return [made]


def table_of(frame: pd.DataFrame) -> Grid:
    """Any table of a job, with times in milliseconds."""
    times = [name for name in frame.columns if str(name).endswith("_ns")]
    made = table(
        [
            (str(name).removesuffix("_ns"), "right" if frame[name].dtype.kind in "iuf" else "left")
            for name in frame.columns
        ]
    )
    for row in frame.to_dict("records"):
        made.add_row(*(_cell(value, name in times) for name, value in row.items()))
    return made


def _cell(value: object, time: bool) -> str:
    if value is None or str(value) in ("nan", "<NA>"):
        return ""
    if time and isinstance(value, (int, float)):
        return _MS(int(value))
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
