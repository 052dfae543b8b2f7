"""Folds equal blocks into one row: `layers.0-79`, 80 blocks, with the median, minimum and maximum of one block.

Blocks are equal if they are in the same layer, their paths differ only in numbers, they have the same submodules, and
their compute times are similar in each phase. A block that differs from its equals keeps its own row. No time is lost:
a folded row is the sum of its blocks.

The rows of a table that is ranked by cost are a cause, a copy or a stack in a layer, not a layer. They fold if their
layers differ only in numbers, all their other texts are equal, and their costs are similar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import Bools, Floats
from nvprof_kit._analysis.layers.tree import ModelTree, layer_parents, with_ancestors
from nvprof_kit._result.column import Columns, Fold, column_of
from nvprof_kit._result.result import Result, table_named
from nvprof_kit.names import LAYER_PHASES, NO_LAYER

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.attribution import Operations

LEAST = 3
"""Minimum number of equal blocks to fold."""

MANY = 8
"""Minimum number of equal blocks to fold a printed table by default."""

EACH = ("median", "min", "max")
"""The columns that folding adds, with the unit of the cost behind them: those of one of the folded rows. Besides them
``unlike`` says in what a row differs from its equals: ``forward +38 %``, ``other parts``; '' where in nothing.
"""

_SIGMAS, _MAD_TO_SIGMA = 5.0, 1.4826
_OF_PHASE, _OF_BLOCK = 0.10, 0.03
"""Minimum relative difference for a block to count as different: of its time in a phase, and of its total time."""
_FEW, _OF_FEW = 8, 0.50
"""Of fewer blocks than this the deviation is no estimate: a block that is so far from their median is different."""


@dataclass(frozen=True)
class Group:
    """Rows of a table that are shown as one.

    Attributes:
        label: The path of their layers: ``layers.0-79``.
        rows: Their positions.
        difference: How they differ from their equals; '' if they do not.
        parent: The label of the group of their parents.
        count: The number of blocks.
    """

    label: str
    rows: Sequence[int]
    difference: str = ""
    parent: str = ""
    count: int = 1


def folded(
    rows: pd.DataFrame, groups: Sequence[Group], cost: pd.Series[Any], unit: str, how: Mapping[str, Fold]
) -> pd.DataFrame:
    """One row per group.

    Args:
        rows: The rows.
        groups: The groups; every row is in one.
        cost: The cost of each row, that `EACH` are of.
        unit: Its unit.
        how: How columns fold; others are those of the first row.

    Returns:
        The rows with the columns ``count``, `EACH` and ``unlike``.
    """
    number = np.repeat(np.arange(len(groups)), [len(group.rows) for group in groups])
    members = np.array([row for group in groups for row in group.rows], dtype=np.int64)
    each = cost.iloc[members].groupby(number)
    table = rows.iloc[[group.rows[0] for group in groups]].reset_index(drop=True)
    together = rows.iloc[members].groupby(number)
    for name, fold in how.items():
        values = together[name].sum(min_count=1) if fold == "sum" else together[name].agg(fold)
        table[name] = (values.round() if rows[name].dtype.kind in "iu" else values).astype(rows[name].dtype)
    count = np.array([group.count for group in groups], dtype=np.int64)
    figures = {f"{name}_{unit}": each.agg(name).round().where(count > 1).astype("Int64") for name in EACH}
    labels, differences = ([getattr(group, name) for group in groups] for name in ("label", "difference"))
    return table.assign(layer=labels, count=count, **figures, unlike=differences)


def marked(rows: pd.DataFrame, groups: Iterable[Group]) -> pd.DataFrame:
    """Rows with the columns ``folded_into``, the label of the blocks that a row folds with, and ``unlike``, unless they
    have one.
    """
    into, differences = (np.full(len(rows), "", dtype=object) for _ in range(2))
    for group in groups:
        into[[*group.rows]] = group.label if group.count > 1 else ""
        differences[[*group.rows]] = group.difference
    with_labels: pd.DataFrame = rows.assign(folded_into=into)
    return with_labels if "unlike" in rows else with_labels.assign(unlike=differences)


# ---------------------------------------------------------------- equal blocks of a model


@dataclass(frozen=True)
class Blocks:
    """Layers to compare, parents before children.

    Attributes:
        layers: Their paths.
        parents: The parent of each layer, '' at the top.
        times: Compute time of each including its submodules, in ns, shape ``(layers, kinds)``.
        kinds: The names of the columns of `times`.
    """

    layers: Sequence[str]
    parents: Sequence[str]
    times: Floats
    kinds: tuple[str, ...] = LAYER_PHASES

    @classmethod
    def of(cls, self_ns: Mapping[tuple[str, str], float], parents: Mapping[str, str], layers: Iterable[str]) -> Blocks:
        """Build from self times.

        Args:
            self_ns: Self time by layer and phase, without submodules.
            parents: The parent of each layer, '' at the top.
            layers: The layers, in any order.
        """
        chains = [with_ancestors(layer, parents) for layer in dict.fromkeys(layers) if layer != NO_LAYER]
        paths = [*dict.fromkeys(layer for chain in chains for layer in chain)]
        tree = ModelTree(paths, [parents.get(layer, "") for layer in paths])
        times = np.zeros((len(paths), len(LAYER_PHASES)))
        for (layer, phase), ns in self_ns.items():
            if layer in tree.index and phase in LAYER_PHASES:
                times[tree.index[layer], LAYER_PHASES.index(phase)] += ns
        return cls(paths, tree.parents, tree.with_nested(times))

    def with_operations(self, rows: pd.DataFrame) -> Blocks:
        """Also compare by floating point operations, converted to time at the average rate of all layers.

        Args:
            rows: Rows by layer and phase, with ``flops`` including submodules.
        """
        by_phase = rows.pivot_table(index="layer", columns="phase", values="flops", aggfunc="sum")
        amounts = by_phase.reindex(index=list(self.layers), columns=LAYER_PHASES).fillna(0).to_numpy(dtype=np.float64)
        if not amounts.sum():
            return self
        amounts = amounts * (self.times[:, : len(LAYER_PHASES)].sum() / amounts.sum())
        kinds = (*self.kinds, *(f"{phase} operations" for phase in LAYER_PHASES))
        return replace(self, times=np.concatenate([self.times, amounts], axis=1), kinds=kinds)

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """The number of ancestors of each layer."""
        return dict(zip(self.layers, ModelTree(self.layers, self.parents).depth.tolist(), strict=True))

    def among(self, layers: Container[str]) -> Blocks:
        """Select layers; one whose ancestors are all excluded becomes a top-level layer."""
        rows = [row for row, layer in enumerate(self.layers) if layer in layers]
        names, parents = ([of[row] for row in rows] for of in (self.layers, self.parents))
        return Blocks(names, parents, self.times[rows], self.kinds)

    def groups(self, folds: bool | None) -> list[Group]:
        """The layers in groups of equal ones, in model order.

        Args:
            folds: Whether to fold; None folds if many blocks are equal.
        """
        groups = [] if folds is False else _Folder(self).groups
        if folds or max((len(group.rows) for group in groups), default=0) >= MANY:
            return groups
        layers = set(self.layers)
        return [
            Group(layer, [row], parent=parent if parent in layers else "")
            for row, (layer, parent) in enumerate(zip(self.layers, self.parents, strict=True))
        ]

    def groups_of(self, rows: pd.DataFrame, folds: bool | None) -> list[Group]:
        """The rows of a table by layer and phase in groups of equal layers, phase by phase."""
        groups = self.groups(folds)
        group_of_layer = {self.layers[member]: group for group in groups for member in group.rows}
        members: dict[str, dict[str, list[int]]] = {}
        for row, (layer, phase) in enumerate(zip(rows["layer"], rows["phase"], strict=True)):
            group = group_of_layer.setdefault(layer, Group(layer, []))
            members.setdefault(group.label, {}).setdefault(phase, []).append(row)
        by_label = {group.label: group for group in group_of_layer.values()}
        return [
            replace(by_label[label], rows=positions)
            for label, by_phase in members.items()
            for positions in by_phase.values()
        ]


NO_BLOCKS = Blocks((), (), np.zeros((0, len(LAYER_PHASES))))
"""No layers, so nothing folds."""


def tree_blocks(tree: pd.DataFrame) -> Blocks:
    """The layers of `nvprof_kit._analysis.layers.layers.Layers.tree`, without what ran outside layers."""
    inside = tree[tree["layer"] != NO_LAYER]
    # a collective includes waiting for other ranks
    times = [inside[f"{phase}_ns"] - inside.get(f"{phase}_comm_ns", 0) for phase in LAYER_PHASES]
    return Blocks(inside["layer"].tolist(), inside["parent"].tolist(), np.stack(times, axis=1).astype(np.float64))


def fold_tree(tree: pd.DataFrame, folds: bool | None = True) -> tuple[pd.DataFrame, list[Group]]:
    """Fold the equal blocks of a model.

    Args:
        tree: `nvprof_kit._analysis.layers.layers.Layers.tree`.
        folds: Whether to fold; None folds if many blocks are equal.

    Returns:
        The tree, one row per group, and the groups. The path of a folded row has number ranges, ``layers.0-79``, and so
        do the paths of the rows below it.
    """
    layers, outside = (np.flatnonzero((tree["layer"] == NO_LAYER) == is_outside) for is_outside in (False, True))
    groups = [replace(group, rows=layers[[*group.rows]].tolist()) for group in tree_blocks(tree).groups(folds)]
    groups += [Group(NO_LAYER, [row]) for row in outside.tolist()]
    how: dict[str, Fold] = {
        str(name): "max" if name == "peak_bytes" else "sum"
        for name in tree.columns.difference(["layer", "phase", "parent", "depth"])
    }
    table = folded(tree, groups, tree["total_ns"] - tree["comm_ns"], "ns", how)
    return table.assign(parent=[group.parent for group in groups]), groups


def computing_blocks(operations: Operations, is_counted: Bools) -> Blocks:
    """The layers with their compute times, as `fold_tree` compares them.

    Args:
        operations: The operations; communication is excluded if their names were read.
        is_counted: The operations to include, shape ``(n,)``.
    """
    trace = operations.trace
    computing = is_counted & ~operations.classes.is_a("comm") if "name" in trace.ops else is_counted
    layer, phase = operations.attribution.owners
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": trace.ops["end_ns"] - trace.ops["start_ns"]})
    self_ns = frame[computing].groupby(["layer", "phase"], observed=True)["ns"].sum()
    parents = layer_parents(operations.attribution.ranges)
    times: Any = self_ns.astype(float).to_dict()
    return Blocks.of(times, parents, parents)


class _Folder:
    """Traverses the model; nodes are indices into the layers.

    Attributes:
        groups: The groups of equal layers, in model order.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._layer, self._times, self._kinds = blocks.layers, blocks.times, blocks.kinds
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(ModelTree(blocks.layers, blocks.parents).parent.tolist()):
            self._children.setdefault(parent, []).append(node)
        # an id for each node; nodes with the same structure (submodules by name) have the same id
        numbers: dict[tuple[tuple[str, int], ...], int] = {}
        self._shape = [0] * len(self._layer)
        for node in reversed(range(len(self._layer))):  # children before their parent
            children = self._children.get(node, [])
            parts = sorted((self._below_name(node, child), self._shape[child]) for child in children)
            self._shape[node] = numbers.setdefault(tuple(parts), len(numbers))
        self.groups: list[Group] = []
        self._below([-1], "")

    def _below_name(self, parent: int, node: int) -> str:
        """A layer's name relative to its parent; its full path with ``*`` for numbers if that does not extend the
        parent's.
        """
        name = self._layer[node]
        prefix = f"{self._layer[parent]}." if parent >= 0 else ""
        return name[len(prefix) :] if name.startswith(prefix) else fold_pattern(name)

    def _below(self, nodes: list[int], parent: str) -> None:
        """Add the groups below a set of equal layers."""
        by_name: dict[str, list[int]] = {}
        for node in nodes:
            for child in self._children.get(node, []):
                name = self._below_name(node, child) if len(nodes) > 1 else self._layer[child]
                by_name.setdefault(name, []).append(child)
        sets_of_shape: dict[tuple[str, int], list[list[int]]] = {}
        for name, equals in by_name.items():
            sets_of_shape.setdefault((fold_pattern(name), self._shape[equals[0]]), []).append(equals)
        largest: dict[str, int] = {}
        for (pattern, _), sets in sets_of_shape.items():
            largest[pattern] = max(largest.get(pattern, 0), len(sets))
        groups: list[Group] = []
        for (pattern, _), sets in sets_of_shape.items():
            other = len(sets) < largest[pattern] and largest[pattern] >= LEAST
            groups += self._group(sets, parent, "other parts" if other else "")
        for group in sorted(groups, key=lambda group: min(group.rows)):
            self.groups.append(group)
            self._below([*group.rows], group.label)

    def _group(self, sets: list[list[int]], parent: str, note: str) -> list[Group]:
        """The groups of layers with the same structure; each is a set if their parents are folded."""
        times = np.array([self._times[nodes].mean(axis=0) for nodes in sets])
        equal_sets = equal_groups(times, LEAST) if len(sets) >= LEAST else []
        largest = max(equal_sets, key=len, default=[])
        main = np.median(times[largest], axis=0) if largest else np.zeros(0)
        alone = set(range(len(sets))).difference(*equal_sets)
        groups = []
        for members in [*equal_sets, *([index] for index in sorted(alone))]:
            nodes = [node for index in members for node in sets[index]]
            difference = note
            if not note and largest and members is not largest:
                # the phase in which it differs the most from its equals
                median = np.median(times[members], axis=0)
                kind = int(np.abs(median - main).argmax())
                change = f"{100 * (median[kind] / main[kind] - 1):+.0f} %" if main[kind] else "only here"
                difference = f"{self._kinds[kind]} {change}"
            label = fold_label([self._layer[node] for node in nodes])
            groups.append(Group(label, nodes, difference, parent, len(nodes)))
        return groups


def equal_groups(times: Floats, min_blocks: int) -> list[list[int]]:
    """Group blocks with similar times.

    If the times form two clusters with a wide gap (alternating local and global attention, for example), each cluster
    is evaluated separately. Within a cluster, a block differs from the others if in any phase its distance from their
    median exceeds five standard deviations (1.4826 times the median absolute deviation; at most half the median if
    there are fewer than eight), a tenth of the phase and 3 % of the block.

    Args:
        times: Time of each block by phase, shape ``(blocks, phases)``.
        min_blocks: Minimum size of a group.

    Returns:
        Groups of indices into `times`; a block in no group differs from all others.
    """
    groups: list[list[int]] = []
    waiting = [np.arange(len(times))]
    while waiting:
        members = waiting.pop()
        if len(members) < min_blocks:
            continue
        if (halves := _heaps(times[members], min_blocks)) is not None:
            waiting += [members[halves], members[~halves]]
            continue
        median = np.median(times[members], axis=0)
        far = np.abs(times[members] - median)
        spread = _SIGMAS * _MAD_TO_SIGMA * np.median(far, axis=0)
        if len(members) < _FEW:
            spread = np.minimum(spread, _OF_FEW * median)
        like = np.all(far <= np.maximum(np.maximum(spread, _OF_PHASE * median), _OF_BLOCK * median.sum()), axis=1)
        if np.count_nonzero(like) >= min_blocks:
            groups.append(members[like].tolist())
            waiting.append(members[~like])
    return sorted(groups)


def _heaps(times: Floats, min_blocks: int) -> Bools | None:
    """The blocks of the lower cluster, if the times form two clusters in any phase."""
    floor = _OF_BLOCK * float(np.median(times.sum(axis=1)))
    for values in times.T:
        in_order = np.sort(values)
        gaps = np.diff(in_order)[min_blocks - 1 : len(values) - min_blocks]
        if not len(gaps):
            return None
        split = min_blocks + int(gaps.argmax())
        low, high = in_order[:split], in_order[split:]
        gap = float(gaps.max())
        spread = _MAD_TO_SIGMA * max(float(np.median(np.abs(side - np.median(side)))) for side in (low, high))
        if gap > max(_SIGMAS * spread, _OF_PHASE * float(np.median(low)), floor):
            is_low: Bools = values <= low[-1]
            return is_low
    return None


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def fold_pattern(path: str) -> str:
    """A path with ``*`` for its numbers."""
    return _NUMBER.sub("*", path)


def fold_label(paths: Sequence[str]) -> str:
    """One path for several that differ in numbers: ``stages.0-3.blocks.0-5``."""
    if len(paths) == 1:
        return paths[0]
    label = []
    for parts in zip(*(path.split(".") for path in paths), strict=True):
        different = set(parts)
        label.append(parts[0] if len(different) == 1 else numbers_text(sorted(map(int, different))))
    return ".".join(label)


def numbers_text(numbers: Sequence[int]) -> str:
    """Sorted numbers in short form: ``0-79``, ``0-2,4-79``, ``1,3,...,79``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and steps != {1} and len(numbers) > 3:
        return f"{numbers[0]},{numbers[1]},...,{numbers[-1]}"
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ",".join(texts if len(texts) <= 4 else (texts[0], "...", texts[-1]))


@dataclass(frozen=True, repr=False, eq=False)
class ByLayer(Result):
    """An answer with a row for each layer and phase.

    Attributes:
        rows: The rows, in model order, ``(none)`` last.
        blocks: The layers as they are compared, to fold the equal ones.
        depth: How many levels of the model to print; None for all.
        time: The column of times: the median, minimum and maximum of folded rows are of it.
    """

    rows: pd.DataFrame = field(kw_only=True)
    blocks: Blocks = field(default=NO_BLOCKS, kw_only=True)
    depth: int | None = field(default=None, kw_only=True)

    time: ClassVar[str]

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        rows = self.table(view)
        return self.select.of(marked(rows, self._groups(rows)) if self.select.fold else rows)

    def printed(self) -> pd.DataFrame:
        """The selected rows as they are printed: down to `depth`, and where equal blocks are folded, one row for all,
        with the columns of `folded`.
        """
        rows = self.rows
        if self.depth is not None:
            rows = rows[[self.blocks.depths.get(layer, 0) < self.depth for layer in rows["layer"]]]
        rows = self.select.among(rows)
        groups = self._groups(rows)
        table = folded(rows, groups, rows[self.time], "ns", {})
        records: list[dict[Any, Any]] = table.to_dict("records")
        for record, group in zip(records, groups, strict=True):
            if group.count > 1:
                record |= {**self.join(group.label, record["phase"], rows.iloc[[*group.rows]]), "layer": group.label}
        return self.select.sorted(pd.DataFrame(records, columns=table.columns))

    def join(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        """The values of equal layers in a phase together: by each column's `fold`; means are weighted by `time`.

        Args:
            path: The path of the folded row.
            phase: Its phase.
            rows: The rows of the layers, with their index in `rows`.
        """
        weight, joined = rows[self.time], {}
        for name, column in self.columns[self.schema].items():
            if column.fold == "sum" and column.kind in ("int", "float"):
                joined[name] = rows[name].sum(skipna=False)
            elif column.fold == "mean":
                total = (rows[name] * weight)[weight > 0].sum(skipna=False)
                joined[name] = total / weight.sum() if weight.sum() else math.nan
            elif column.fold == "first":
                joined[name] = rows[name].iloc[0]
        return joined

    def _groups(self, rows: pd.DataFrame) -> list[Group]:
        return self.blocks.among(set(rows["layer"])).groups_of(rows, self.select.fold)


# ---------------------------------------------------------------- rows ranked by cost


def fold_ranked(
    rows: pd.DataFrame, columns: Columns, cost: str, folds: bool | None, equal_columns: Sequence[str] = ()
) -> pd.DataFrame:
    """Fold equal blocks into one row with their sums, or what else their columns fold to.

    Args:
        rows: Rows with a column ``layer``.
        columns: Their columns; a number that is not among them is summed.
        cost: The column that ranks the rows.
        equal_columns: The columns to compare; empty for the cost.
        folds: Whether to fold; None folds if many blocks are equal.

    Returns:
        The rows, the costliest first, with the columns `EACH` and ``unlike``. The layer of a folded row is
        ``layers.0-79 x80``. Without anything to fold, the rows as they are.
    """
    if folds is False or "layer" not in rows or len(rows) < LEAST:
        return rows
    groups = _ranked_groups(rows, columns, cost, equal_columns)
    if max(group.count for group in groups) < (LEAST if folds else MANY):
        return rows
    how = {str(name): fold for name in rows if (fold := _fold_of(rows, columns, str(name))) not in ("key", "first")}
    table = folded(rows, groups, rows[cost], cost.rpartition("_")[2], how)
    labels = [f"{group.label} x{group.count}" if group.count > 1 else group.label for group in groups]
    table = table.assign(layer=labels).drop(columns="count")
    return table.sort_values(cost, ascending=False, kind="stable", key=abs, ignore_index=True)


def mark_ranked(rows: pd.DataFrame, columns: Columns, cost: str, equal_columns: Sequence[str] = ()) -> pd.DataFrame:
    """Add the columns ``folded_into``, the label of the folded row, and ``unlike``, unless there is one."""
    return marked(rows, _ranked_groups(rows, columns, cost, equal_columns)) if "layer" in rows else rows


def _ranked_groups(rows: pd.DataFrame, columns: Columns, cost: str, equal_columns: Sequence[str]) -> list[Group]:
    """Rows that do not fold, then groups of those that do."""
    layers = rows["layer"].astype(str).tolist()
    names = [name for name in rows.columns if name != "layer" and _fold_of(rows, columns, str(name)) == "key"]
    keys = [rows[name].astype(str).tolist() for name in names]
    rows_of_key: dict[tuple[str, ...], list[int]] = {}
    for row, key in enumerate(zip(map(fold_pattern, layers), *keys, strict=True)):
        if key[0] != layers[row]:
            rows_of_key.setdefault(key, []).append(row)
    figures = rows[[*(equal_columns or (cost,))]].fillna(0).to_numpy(dtype=np.float64)
    costs = rows[cost].fillna(0).to_numpy(dtype=np.float64)
    groups: list[Group] = []
    differences: dict[int, str] = {}
    for members in _equal_in_lists(list(rows_of_key.values()), layers, figures):
        if len({layers[row] for row in members}) < len(members):  # the same layer twice: something else differs
            continue
        equal_sets = equal_groups(np.abs(figures[members]), LEAST) if len(members) >= LEAST else []
        largest = max(equal_sets, key=len, default=[])
        median = float(np.median(costs[members][largest])) if largest else 0.0
        for index in set(range(len(members))).difference(largest) if median else ():
            differences[members[index]] = f"{100 * (costs[members[index]] / median - 1):+.0f} %"
        for equals in equal_sets:
            group = [members[index] for index in equals]
            label = fold_label([layers[row] for row in group])
            groups.append(Group(label, group, differences.get(group[0], ""), count=len(group)))
    alone = sorted(set(range(len(rows))).difference(*(group.rows for group in groups)))
    return [*(Group(layers[row], [row], differences.get(row, "")) for row in alone), *groups]


def _equal_in_lists(groups: list[list[int]], layers: Sequence[str], figures: Floats) -> list[list[int]]:
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
        for group in [*together, *([member] for member in sorted(alone))]:
            lists.append([row_number for member in group for row_number in sets[member]])
    return lists


def _fold_of(rows: pd.DataFrame, columns: Columns, name: str) -> Fold:
    """How a column folds: what is no number identifies the row."""
    if rows[name].dtype.kind not in "iuf":
        return "key"
    column = column_of(columns, name)
    return "sum" if column is None else column.fold


@dataclass(frozen=True, repr=False, eq=False)
class Views(Result):
    """An answer of several tables. Those with rows of layers are ranked by a cost, and equal blocks in them fold.

    Attributes:
        view: The table to print and to return from `to_frame`; None prints all and returns the first.
        ranked: Of each ranked table its cost, and the columns in which equal blocks are alike, if not the cost alone.
            A cost that is no column is the sum of these.
    """

    view: str | None = field(default=None, kw_only=True)

    ranked: ClassVar[Mapping[str, tuple[str, Sequence[str]]]] = {}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """All tables by view; each is the attribute of that name."""
        views = [schema.partition("-")[2] for schema in self.columns]
        return {view: getattr(self, view.replace("-", "_")) for view in views}

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return self._schema(self.view or next(iter(self.tables)))

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One of the tables.

        Raises:
            UsageError: There is no such table.
        """
        return table_named(self.tables, view or self.view or next(iter(self.tables)))

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; where equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        rows, view = self.table(view), view or self.view or next(iter(self.tables))
        if self.select.fold and view in self.ranked:
            cost, alike = self.ranked[view]
            folded_rows = mark_ranked(_with_cost(rows, cost, alike), self.columns[self._schema(view)], cost, alike)
            rows = folded_rows[[*rows, "folded_into", "unlike"]]
        return self.select.of(rows)

    def printed(self) -> dict[str, pd.DataFrame]:
        """The tables that are printed: the selected rows, with equal blocks folded."""
        views = {self.view: self.table()} if self.view else self.tables
        tables = replace(self.select, sort="").each(views)
        for name in tables.keys() & self.ranked.keys():
            cost, alike = self.ranked[name]
            rows, columns = _with_cost(tables[name], cost, alike), self.columns[self._schema(name)]
            rows = fold_ranked(rows, columns, cost, self.select.fold, alike)
            tables[name] = rows if cost in tables[name] else rows.drop(columns=cost)
        return self.select.each(tables)

    def _schema(self, view: str) -> str:
        return f"{next(iter(self.columns)).partition('-')[0]}-{view}"


def _with_cost(rows: pd.DataFrame, cost: str, alike: Sequence[str]) -> pd.DataFrame:
    return rows if cost in rows else rows.assign(**{cost: rows[[*alike]].sum(axis=1)})
