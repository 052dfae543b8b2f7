"""Folds equal blocks in a table that is ranked by cost and has other columns beside the layer.

The tables of `nvprof_kit._analysis.layers.fold` have a row for each layer of the model. Those here have one for a
cause, a copy or a stack in it, and not for each layer. Rows fold if their layers differ only in numbers, all their
other texts are equal, and their costs are similar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._analysis.layers.fold import LEAST, MANY, Floats, equal_groups, fold_label, fold_pattern

if TYPE_CHECKING:
    import pandas as pd

EACH = ("median", "min", "max")
"""The columns that `fold_ranked` adds, with the unit of the cost behind them: those of one of the folded rows."""

_LARGEST = ("longest_ns", "largest", "largest_bytes", "p", "within", "high")
_LEAST = ("low",)
_MEAN = ("gb_per_s", "algorithm_gb_per_s", "bus_gb_per_s", "of_link", "hidden", "delay_ns", "short_ns")
_FIRST = ("longest_at_ns",)
_KEYS = ("ranks", "process", "device", "rank", "step", "stream", "slowest", "launch_bound")


def fold_ranked(rows: pd.DataFrame, cost: str, folds: bool | None, equal_columns: Sequence[str] = ()) -> pd.DataFrame:
    """Fold equal blocks into one row with their sums.

    Args:
        rows: Rows with a column ``layer``.
        cost: The column that ranks the rows.
        equal_columns: The columns to compare; empty for the cost.
        folds: Whether to fold; None folds if many blocks are equal.

    Returns:
        The rows, the costliest first. The layer of a folded row is ``layers.0-79 x80``, and `EACH` is the cost of one
        of its rows. The column ``unlike`` says how a row differs from its equals. Without anything to fold, the rows as
        they are.
    """
    import pandas as pd

    if folds is False or "layer" not in rows or len(rows) < LEAST:
        return rows
    groups, differences = _groups(rows, cost, equal_columns or (cost,))
    largest = max(map(len, groups), default=0)
    if largest < (LEAST if folds else MANY):
        return rows
    unit = cost.rpartition("_")[2]
    inside = {row_number for group in groups for row_number in group}
    records: list[dict[Any, Any]] = []
    for row_number, row in enumerate(rows.to_dict("records")):
        if row_number not in inside:
            records.append({**row, "unlike": differences.get(row_number, "")})
    for group in groups:
        records.append({**_joined(rows.iloc[group], cost, unit), "unlike": differences.get(group[0], "")})
    each = [f"{name}_{unit}" for name in EACH]
    table = pd.DataFrame(records, columns=[*rows.columns, *each, "unlike"])
    for name in rows.columns:
        table[name] = table[name].astype(rows[name].dtype)
    table[each] = table[each].astype("Int64")
    ranked: pd.DataFrame = table.sort_values(cost, ascending=False, kind="stable", key=abs, ignore_index=True)
    return ranked


def mark_ranked(rows: pd.DataFrame, cost: str, equal_columns: Sequence[str] = ()) -> pd.DataFrame:
    """Add the columns ``folded_into``, the label of the folded row, and ``unlike``, unless there is one."""
    if "layer" not in rows:
        return rows
    groups, note_of_row = _groups(rows, cost, equal_columns or (cost,))
    layers = rows["layer"].astype(str).tolist()
    into = [""] * len(rows)
    for group in groups:
        for row_number in group:
            into[row_number] = fold_label([layers[member] for member in group])
    differences = [note_of_row.get(row_number, "") for row_number in range(len(rows))]
    marked: pd.DataFrame = rows.assign(folded_into=np.array(into, dtype=object))
    return marked if "unlike" in rows else marked.assign(unlike=np.array(differences, dtype=object))


def _groups(rows: pd.DataFrame, cost: str, alike_by: Sequence[str]) -> tuple[list[list[int]], dict[int, str]]:
    """The places of the rows that fold together, and how rows differ from their equals."""
    layers = rows["layer"].astype(str).tolist()
    keys = [rows[name].astype(str).tolist() for name in rows.columns if name != "layer" and _is_key(rows, str(name))]
    rows_of_key: dict[tuple[str, ...], list[int]] = {}
    for row_number, key in enumerate(zip(map(fold_pattern, layers), *keys, strict=True)):
        if key[0] != layers[row_number]:
            rows_of_key.setdefault(key, []).append(row_number)
    figures = rows[list(alike_by)].fillna(0).to_numpy(dtype=np.float64)
    costs = rows[cost].fillna(0).to_numpy(dtype=np.float64)
    groups: list[list[int]] = []
    differences: dict[int, str] = {}
    for places in _alike_in_lists(list(rows_of_key.values()), layers, figures):
        if len({layers[row_number] for row_number in places}) < len(
            places
        ):  # the same layer twice: something else differs
            continue
        equal_sets = equal_groups(np.abs(figures[places]), LEAST) if len(places) >= LEAST else []
        if not equal_sets:
            continue
        main = max(equal_sets, key=len)
        median = float(np.median(costs[[places[member] for member in main]]))
        groups += [[places[member] for member in group] for group in equal_sets]
        for member in set(range(len(places))).difference(main):
            if median:
                differences[places[member]] = f"{100 * (costs[places[member]] / median - 1):+.0f} %"
    return groups, differences


def _alike_in_lists(groups: list[list[int]], layers: Sequence[str], figures: Floats) -> list[list[int]]:
    """Split rows of lists in lists by their place in the inner lists, unless rows at different places are alike.

    ``layers.0-31.experts.0-7`` are alike; in ``block.0-3.layer.0-2`` each layer may be another kind of module.
    """
    lists: list[list[int]] = []
    for places in groups:
        inner: dict[str, list[int]] = {}
        for row_number in places:
            parts = layers[row_number].split(".")
            first = next(index for index, path_part in enumerate(parts) if path_part.isdigit())
            inner.setdefault(".".join(parts[first + 1 :]), []).append(row_number)
        if len(inner) in {1, len(places)}:
            lists.append(places)
            continue
        sets = list(inner.values())
        means = np.array([np.abs(figures[member]).mean(axis=0) for member in sets])
        together = equal_groups(means, 2)
        alone = set(range(len(sets))).difference(*together)
        lists += [
            [row_number for member in group for row_number in sets[member]]
            for group in [*together, *([member] for member in sorted(alone))]
        ]
    return lists


def _is_key(rows: pd.DataFrame, name: str) -> bool:
    return name in _KEYS or rows[name].dtype.kind not in "iuf"


def _joined(group: pd.DataFrame, cost: str, unit: str) -> dict[Any, Any]:
    """One row for several."""
    row = dict(group.iloc[0].to_dict())
    for name in group.columns:
        if _is_key(group, str(name)) or name in _FIRST or group[name].isna().all():
            continue
        values = group[name]
        row[name] = (
            values.max() if name in _LARGEST else values.min() if name in _LEAST
            else values.mean() if name in _MEAN else values.sum()
        )  # fmt: skip
        if values.dtype.kind in "iu":
            row[name] = round(row[name])
    figures = (group[cost].median(), group[cost].min(), group[cost].max())
    label = f"{fold_label(group['layer'].astype(str).tolist())} x{len(group)}"
    return {
        **row,
        "layer": label,
        **{f"{name}_{unit}": round(figure) for name, figure in zip(EACH, figures, strict=True)},
    }
