"""Text report of the ranks of a job: verdict, waiting by rank and cause, clocks, and slow layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.layers.fold import fold_ranked
from nvprof_kit._ranks.answer import Ranks, RankTable, job_size
from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit._report.text.table import Column, Grid, Row, below, frame_table
from nvprof_kit._report.text.texts import MS, is_missing, percent
from nvprof_kit._result import column
from nvprof_kit.issues import plural

if TYPE_CHECKING:
    import pandas as pd


Section = list[Any]
"""A heading, a table, and what follows it."""

FOLD = 8
"""Maximum number of ranks with a line each; with more, only unlike ranks have one, and the rest share a line."""


def ranks_report(result: Ranks) -> list[RenderableType]:
    """The report: verdict, waiting by cause, layers, clocks, critical path and what-if."""
    top, fold = result.select.top or 10, result.select.fold
    if result.select.asked:
        tables_of_layers = {name: getattr(result, name) for name in ("charges", "layers", "critical_path")}
        selected_tables: dict[str, Any] = dict(result.select.each(tables_of_layers))
        result = replace(result, **selected_tables)
    verdict = result.verdict
    style = {"critical": "bold red", "warning": "bold yellow"}.get(verdict.severity, "bold green")
    facts = " · ".join(job_size(len(result.clocks), result.steps, result.collectives))
    parts: list[RenderableType] = [Text(facts), "", Text(verdict.sentence, style), ""]
    parts += _charges(result.charges, result.steps, result.total_wait_ns, top, fold)
    parts += _who_waits(result.matrix, top)
    parts += _unlike(result.layers, top, fold)
    parts += _groups(result.groups, top)
    if len(result.bubbles):
        by_stage = result.bubbles.groupby("stage", sort=True)
        means = by_stage[["step_ns", "busy_ns", "wait_ns", "host_ns", "other_ns", "bubble_ns"]].mean()
        means = means.assign(share=means["bubble_ns"] / means["step_ns"].clip(lower=1))
        means.insert(0, "ranks", by_stage["rank"].nunique())
        rows = means.reset_index().rename(columns={"wait_ns": "sends and receives_ns"})
        share = percent(float(result.bubbles["ideal_share"].median()))
        ideal = Text(f"Equal stages could not go below {share} with GPipe or 1F1B.", "dim")
        parts += _section("Bubbles of the pipeline's stages, mean over steps", rows, len(rows), ideal)
    parts += _clocks(result.clocks)
    if len(result.critical_path):
        path = _folded(summed(result.critical_path, "ns", ON_THE_PATH), COLUMNS["critical-path"], fold)
        path_ns = max(int(path.sum()), 1)
        parts += _section(
            "Critical path across ranks, all steps", _largest(path.rename("time_ns"), top, path_ns), top + 1
        )
        measured, error = MS(int(result.what_if["measured_ns"].iloc[0])), result.replay_error or 0.0
        note = f"A replay without changes gives the measured mean step of {measured} ms to within {percent(error)}."
        warning = "" if error <= 0.02 else " That is more than 2 %: do not trust the savings."
        rows = result.what_if[["what", "step_ns", "saved_ns", "saved_share"]]
        rows = rows.rename(columns={"what": "as fast as the median", "saved_share": "share"})
        parts += _section("What if", rows, len(rows), Text(note + warning, "yellow" if warning else "dim"))
    note = "Milliseconds. A rank waits from its kernel's start to the last rank's; all waiting is in the first table."
    return [*parts, *below((note,), result.warnings)]


def _section(title: str, rows: pd.DataFrame, top: int, *notes: RenderableType) -> Section:
    """A heading, a table as it is, and notes."""
    return [Text(title, "bold"), frame_table(rows, top), *notes, ""]


CHARGED_TO = ("rank", "cause", "layer", "phase")
ON_THE_PATH = ("rank", "layer", "phase", "what")
"""What waiting, and the critical path across ranks, are summed by."""


def summed(rows: pd.DataFrame, time: str, keys: Sequence[str]) -> pd.Series[int]:
    """Sums of times by some keys, the largest first."""
    return rows.groupby([*keys], sort=False)[time].sum().sort_values(ascending=False, kind="stable")


def _largest(sums: pd.Series[int], top: int, all_ns: int) -> pd.DataFrame:
    """The first of some sums by their keys, with their share of all, and the others in one row."""
    rows = sums.head(top).reset_index().astype(object)
    if len(remaining := sums.iloc[top:]):
        last_row: Any = ["", f"{len(remaining)} more", *[""] * (len(rows.columns) - 3), int(remaining.sum())]
        rows.loc[len(rows)] = last_row
    rows["share"] = [ns / all_ns if all_ns else None for ns in rows[sums.name]]
    return rows


def _charges(charges: pd.DataFrame, steps: int, total: int, top: int, fold: bool | None) -> Section:
    """Waiting by charged rank and cause: the largest first, the rest in one line."""
    if not len(charges):
        return []
    charged = _folded(summed(charges, "wait_ns", CHARGED_TO), COLUMNS["charges"], fold)
    rows = _largest(charged.rename_axis(index={"rank": "late rank"}).rename("waiting_ns"), top, total)
    rows.loc[len(rows)] = ["", "all", "", "", total, 1.0 if total else None]
    over = f"{plural(steps, 'step')} and all ranks" if steps else "all ranks"
    parts = _section(f"Waiting in collectives, over {over}, by late rank and cause", rows, len(rows))
    grid: Grid = parts[1]
    grid.rows[-1:] = [Row(), replace(grid.rows[-1], style="bold")]
    return parts


def _who_waits(matrix: pd.DataFrame, top: int) -> Section:
    """Who waited for whom: a matrix if there are few ranks, else the late ranks and the time others waited for each."""
    if not len(matrix):
        return []
    ranks = sorted(set(matrix["waiting_rank"]) | set(matrix["late_rank"]))
    if len(ranks) <= FOLD:
        cells = matrix.set_index(["waiting_rank", "late_rank"])["wait_ns"].unstack(fill_value=0)
        wide = cells.reindex(index=ranks, columns=ranks, fill_value=0).astype(object)
        for rank in ranks:
            wide.loc[rank, rank] = "·"
        wide = wide.rename(columns="{}_ns".format).rename_axis("waits ↓  for →").reset_index()
        return _section("Who waited for whom", wide, len(wide))
    waits = matrix.groupby("late_rank")["wait_ns"].agg(waiting_ns="sum", ranks_that_waited="size", longest_ns="max")
    sums = waits.reset_index().astype({"late_rank": object})
    sums = sums.sort_values("waiting_ns", ascending=False, ignore_index=True)
    return _section("Whom the others waited for", sums, top)


def _folded(sums: pd.Series[int], columns: column.Columns, fold: bool | None) -> pd.Series[int]:
    """Sums by layer and other keys, with equal blocks in one."""
    keys = list(sums.index.names)
    rows = fold_ranked(sums.reset_index(), columns, str(sums.name), fold)
    return rows.set_index(keys)[sums.name]


def _unlike(layers: pd.DataFrame, top: int, fold: bool | None) -> Section:
    """Layers by rank: those that differ most if there are few ranks, else only ranks unlike their equals."""
    ranks = sorted(layers["rank"].unique())
    if len(ranks) <= FOLD:
        wide = layers.pivot_table(index=["layer", "phase"], columns="rank", values="median_ns", aggfunc="sum")
        by_rank = wide.assign(by_ns=wide.max(axis=1) - wide.min(axis=1), slowest=wide.idxmax(axis=1))
        by_rank = by_rank.rename(columns=str).reset_index()
        names = {str(rank): rank for rank in wide.columns}
        folded = fold_ranked(by_rank, {"slowest": column.Column("rank", fold="key")}, "by_ns", fold, tuple(names))
        wide = folded.rename(columns=names).set_index(["layer", "phase"])[list(names.values())]
        gap = (wide.max(axis=1) - wide.min(axis=1)).sort_values(ascending=False)
        rows = wide.loc[gap[gap > 0].head(top).index].rename(columns=lambda rank: f"rank {rank}_ns")
        rows = rows.assign(slowest=wide.idxmax(axis=1).astype(int), by_ns=gap).reset_index()
        return _section("Layers whose ranks differ most: computing, median over steps", rows, len(rows))
    slow_rows = layers[layers["unlike"]].sort_values("excess_ns", ascending=False)
    if not len(slow_rows):
        return [Text(f"No rank computes unlike its equals in any layer ({len(ranks)} ranks).", "bold"), ""]
    title = f"Ranks unlike their equals: {slow_rows['rank'].nunique()} of {len(ranks)}"
    rows = slow_rows[["layer", "phase", "rank", "median_ns", "peers_ns", "excess_ns"]]
    return _section(title, rows.rename(columns={"peers_ns": "its equals_ns"}), top)


def _groups(groups: pd.DataFrame, top: int) -> Section:
    """The communicators and their purpose; one line per kind and size."""
    if not len(groups):
        return []
    kinds = ("kinds", lambda texts: ", ".join(sorted({kind for text in texts for kind in text.split(", ")})))
    columns = {"groups": ("ranks", "size"), "for example": ("ranks", "first"), "does": kinds}
    rows = groups.groupby(["parallel", "size"], sort=True, as_index=False).agg(**columns)
    rows = rows[["parallel", "groups", "size", "for example", "does"]].rename(columns={"size": "of ranks"})
    return _section("Parallel groups", rows, top)


def _clocks(clocks: pd.DataFrame) -> Section:
    """The clocks; if there are many ranks, the quality of their alignment and the worst ones."""
    rows, title = clocks, "Clocks"
    if len(clocks) > FOLD:
        rows = clocks.sort_values("residual_ns", ascending=False).head(3)
        residual = clocks["residual_ns"].median()
        aligned = f"{clocks['offset_ns'].notna().sum():,} of {len(clocks):,} aligned"
        title = f"Clocks: {aligned}, median residual {residual / 1e3:,.1f} µs; the worst"
    grid = Grid({name: Column(name) for name in ("rank", "offset", "drift", "residual", "collectives")})
    for row in rows.to_dict("records"):
        cells = {"rank": str(row["rank"]), "offset": "not aligned", "collectives": "0"}
        if not is_missing(row["offset_ns"]):
            cells["offset"] = f"{row['offset_ns'] / 1e6:,.3f} ms"
            cells["drift"] = f"{row['drift_ppm']:.2f} ppm" if row["drift_ppm"] else "none seen"
            cells["residual"], cells["collectives"] = f"{row['residual_ns'] / 1e3:,.1f} µs", str(row["matched"])
        grid.add(cells)
    return [Text(title, "bold"), grid, ""]


_COSTS = {"waits": "wait_ns", "charges": "cost_ns", "layers": "excess_ns"}
"""The cost of the rows of tables that have another order."""


def rank_table(result: RankTable) -> list[RenderableType]:
    """The rows of a job's table, the costliest if there are many, and the number of omitted rows."""
    rows, top = result.to_frame(), result.select.top or 20
    if len(rows) > top and result.name in _COSTS and not result.select.sort:
        rows = rows.sort_values(_COSTS[result.name], ascending=False, kind="stable")
    return [frame_table(rows, top, result.columns[result.schema])]
