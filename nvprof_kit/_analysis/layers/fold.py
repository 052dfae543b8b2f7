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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.layers.tree import ModelTree, layer_parents, with_ancestors
from nvprof_kit._result.column import Columns, Fold, column_of
from nvprof_kit._result.result import Result
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd


LEAST = 3
"""Minimum number of equal blocks to fold."""

MANY = 8
"""Minimum number of equal blocks to fold a printed table by default."""

COLUMNS = {
    "count": "blocks that the row stands for; 1 where it is a layer's own",
    "median_ns": "median of what one of them takes without communication, which may be waiting, in ns",
    "min_ns": "the least, in ns",
    "max_ns": "the most, in ns",
    "unlike": "in what a row differs from its equals: `forward +38 %`, `other parts`; '' where in nothing",
}
"""The columns that `fold` adds to those of `nvprof_kit._analysis.layers.layers.Layers.tree`."""

_PHASES = tuple(category.value for category in LAYER_CATEGORIES)
_SIGMAS, _MAD_TO_SIGMA = 5.0, 1.4826
_OF_PHASE, _OF_BLOCK = 0.10, 0.03
"""Minimum relative difference for a block to count as different: of its time in a phase, and of its total time."""
_FEW, _OF_FEW = 8, 0.50
"""Of fewer blocks than this the deviation is no estimate: a block that is so far from their median is different."""

Floats = npt.NDArray[np.float64]
Join = Callable[[str, str, "pd.DataFrame"], "dict[str, Any]"]


@dataclass(frozen=True)
class Blocks:
    """Layers to compare, parents before children.

    Attributes:
        layers: Their paths.
        parents: The parent of each layer, '' at the top.
        times: Compute time of each including its submodules, in ns, shape ``(layers, kinds)``.
        kinds: The names of the columns of `times`.
    """

    layers: tuple[str, ...]
    parents: tuple[str, ...]
    times: Floats
    kinds: tuple[str, ...] = _PHASES

    @classmethod
    def of(cls, self_ns: Mapping[tuple[str, str], float], parents: Mapping[str, str], layers: Iterable[str]) -> Blocks:
        """Build from self times.

        Args:
            self_ns: Self time by layer and phase, without submodules.
            parents: The parent of each layer, '' at the top.
            layers: The layers, in any order.
        """
        chains = [with_ancestors(layer, parents) for layer in dict.fromkeys(layers) if layer != NO_LAYER]
        paths = tuple(dict.fromkeys(layer for chain in chains for layer in chain))
        tree = ModelTree(paths, tuple(parents.get(layer, "") for layer in paths))
        times = np.zeros((len(paths), len(_PHASES)))
        for (layer, phase), ns in self_ns.items():
            if layer in tree.index and phase in _PHASES:
                times[tree.index[layer], _PHASES.index(phase)] += ns
        return cls(paths, tree.parents, tree.with_nested(times))

    def with_amounts(self, rows: pd.DataFrame, column: str, noun: str) -> Blocks:
        """Also compare by an amount, converted to time at the average rate of all layers.

        Args:
            rows: Rows by layer and phase.
            column: The column of amounts, each including submodules.
            noun: What the amounts measure.
        """
        row_of_layer = {layer: row for row, layer in enumerate(self.layers)}
        amounts = np.zeros((len(row_of_layer), len(_PHASES)))
        for layer, phase, amount in zip(rows["layer"], rows["phase"], rows[column], strict=True):
            if layer in row_of_layer and phase in _PHASES:
                amounts[row_of_layer[layer], _PHASES.index(phase)] = amount
        if not amounts.sum():
            return self
        amounts *= self.times[:, : len(_PHASES)].sum() / amounts.sum()
        kinds = (*self.kinds, *(f"{phase} {noun}" for phase in _PHASES))
        return Blocks(self.layers, self.parents, np.concatenate([self.times, amounts], axis=1), kinds)

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """The number of ancestors of each layer."""
        return dict(zip(self.layers, ModelTree(self.layers, self.parents).depth.tolist(), strict=True))

    def among(self, layers: Container[str]) -> Blocks:
        """Select layers; one whose ancestors are all excluded becomes a top-level layer."""
        indices = [index for index, layer in enumerate(self.layers) if layer in layers]
        names, parents = (tuple(of[index] for index in indices) for of in (self.layers, self.parents))
        return Blocks(names, parents, self.times[indices], self.kinds)


NO_BLOCKS = Blocks((), (), np.zeros((0, len(_PHASES))))
"""No layers, so nothing folds."""


@dataclass(frozen=True)
class Folding:
    """Which layers share a row.

    Attributes:
        into: Path of the folded row for each folded layer; layers with their own row are not in it.
        differences: How a layer differs from its equals, '' if it does not.
    """

    into: Mapping[str, str]
    differences: Mapping[str, str]

    @classmethod
    def of(cls, blocks: Blocks, folds: bool | None) -> Folding:
        """Fold the equal blocks among some layers.

        Args:
            blocks: The layers.
            folds: Whether to fold; None folds if many blocks are equal.
        """
        of_row = [(row, [blocks.layers[node] for node in row.nodes]) for row in _rows(blocks, folds)]
        return cls(
            {layer: row.label for row, layers in of_row if len(layers) > 1 for layer in layers},
            {layer: row.difference for row, layers in of_row for layer in layers},
        )

    def marked(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Add the columns `folded_into`, the path of the folded row, and `unlike` to rows of layers."""
        layer = rows["layer"].astype(object)
        added = {"folded_into": layer.map(dict(self.into)), "unlike": layer.map(dict(self.differences))}
        marked_rows: pd.DataFrame = rows.assign(
            **{name: column.fillna("").astype(object) for name, column in added.items()}
        )
        return marked_rows

    def rows(self, rows: pd.DataFrame, cost: str, join: Join) -> pd.DataFrame:
        """One row per folded layer and phase.

        Args:
            rows: Rows by layer and phase, in model order.
            cost: The time column that `COLUMNS` refer to.
            join: Computes the columns of a folded row from its path, its phase and the rows in it.

        Returns:
            The rows with the columns `COLUMNS`.
        """
        import pandas as pd

        label = [self.into.get(layer, layer) for layer in rows["layer"]]
        number_of_label = {item: number for number, item in enumerate(dict.fromkeys(label))}
        several = pd.Series(list(self.into.values()), dtype=object).value_counts().to_dict()
        groups: dict[tuple[int, str], list[int]] = {}
        for row, (path, phase) in enumerate(zip(label, rows["phase"], strict=True)):
            groups.setdefault((number_of_label[path], str(phase)), []).append(row)
        records = []
        for (_, phase), members in sorted(groups.items(), key=lambda group: group[0][0]):
            group, path = rows.iloc[members], label[members[0]]
            row_values = group.iloc[0].to_dict() if path not in several else {**join(path, phase, group), "layer": path}
            each = group[cost]
            figures = (several.get(path, 1), round(float(each.median())), int(each.min()), int(each.max()))
            difference = self.differences.get(group["layer"].iloc[0], "")
            records.append({**row_values, "phase": phase, **dict(zip(COLUMNS, (*figures, difference), strict=True))})
        table: pd.DataFrame = pd.DataFrame(records, columns=[*rows.columns, *COLUMNS])
        return table


@dataclass(frozen=True)
class FoldedTree:
    """The model with equal blocks folded.

    Attributes:
        tree: The columns of the tree and `COLUMNS`. The path of a folded row has number ranges, ``layers.0-79``, and so
            do the paths of the rows below it. Its times are sums over its blocks.
        line: For each row of the unfolded tree, its row in `tree`.
    """

    tree: pd.DataFrame
    line: Int64Array

    def joined(self, values: pd.Series[int], how: str = "sum") -> pd.Series[int]:
        """Aggregate another column of the unfolded tree by ``sum`` or ``max``; missing if all values are."""
        groups = values.reset_index(drop=True).groupby(self.line)
        column: pd.Series[int] = groups.max() if how == "max" else groups.sum(min_count=1)
        return column


def tree_blocks(tree: pd.DataFrame) -> Blocks:
    """The layers of `nvprof_kit._analysis.layers.layers.Layers.tree`, without what ran outside layers."""
    inside = tree[tree["layer"] != NO_LAYER]
    # a collective includes waiting for other ranks
    times = [
        (inside[f"{phase}_ns"] - inside[f"{phase}_comm_ns"] if f"{phase}_comm_ns" in inside else inside[f"{phase}_ns"])
        for phase in _PHASES
    ]
    return Blocks(tuple(inside["layer"]), tuple(inside["parent"]), np.stack(times, axis=1).astype(np.float64))


def fold(tree: pd.DataFrame, folds: bool | None = True) -> FoldedTree:
    """Fold the equal blocks of a model.

    Args:
        tree: `nvprof_kit._analysis.layers.layers.Layers.tree`.
        folds: Whether to fold; None folds if many blocks are equal.
    """
    import pandas as pd

    layers, outside = ([*np.flatnonzero((tree["layer"] == NO_LAYER) == is_outside)] for is_outside in (False, True))
    rows = [replace(row, nodes=[int(layers[node]) for node in row.nodes]) for row in _rows(tree_blocks(tree), folds)]
    rows += [_Row(NO_LAYER, "", [int(node)]) for node in outside]
    line = np.empty(len(tree), dtype=np.int64)
    for line_number, row in enumerate(rows):
        line[row.nodes] = line_number
    keys = ("layer", "phase", "parent", "depth")
    sums = tree.drop(columns=list(keys)).reset_index(drop=True).groupby(line).sum()
    texts: dict[str, list[Any]] = {
        "layer": [row.label for row in rows],
        "phase": [tree["phase"].iloc[row.nodes[0]] for row in rows],
        "parent": [row.parent for row in rows],
        "depth": [tree["depth"].iloc[row.nodes[0]] for row in rows],
    }
    work = (tree["total_ns"] - tree["comm_ns"]).to_numpy()
    each = [work[row.nodes] for row in rows]
    added = {
        "count": [len(row.nodes) for row in rows],
        "median_ns": [round(float(np.median(times))) for times in each],
        "min_ns": [int(times.min()) for times in each],
        "max_ns": [int(times.max()) for times in each],
        "unlike": [row.difference for row in rows],
    }
    table: pd.DataFrame = pd.concat([pd.DataFrame(texts), sums, pd.DataFrame(added)], axis=1)
    table = table[[*tree.columns, *COLUMNS]]
    return FoldedTree(table, line)


@dataclass(frozen=True)
class _Row:
    label: str
    parent: str
    nodes: list[int]
    difference: str = ""


def _rows(blocks: Blocks, folds: bool | None) -> list[_Row]:
    """A row for each layer, or one for equal blocks; with None, only if many are equal."""
    rows = [] if folds is False else _Folder(blocks).walk()
    if folds or max((len(row.nodes) for row in rows), default=0) >= MANY:
        return rows
    layers = set(blocks.layers)
    parents = (parent if parent in layers else "" for parent in blocks.parents)
    return [
        _Row(layer, parent, [node]) for node, (layer, parent) in enumerate(zip(blocks.layers, parents, strict=True))
    ]


class _Folder:
    """Traverses the model; nodes are indices into the layers."""

    def __init__(self, blocks: Blocks) -> None:
        self._layer, self._times, self._kinds = blocks.layers, blocks.times, blocks.kinds
        node_of_layer = {layer: node for node, layer in enumerate(self._layer)}
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(blocks.parents):
            self._children.setdefault(node_of_layer.get(parent, -1), []).append(node)
        # an id for each node; nodes with the same structure (submodules by name) have the same id
        numbers: dict[tuple[tuple[str, int], ...], int] = {}
        self._shape = [0] * len(self._layer)
        for node in reversed(range(len(self._layer))):  # children before their parent
            children = self._children.get(node, [])
            parts = sorted((self._below_name(node, child), self._shape[child]) for child in children)
            self._shape[node] = numbers.setdefault(tuple(parts), len(numbers))
        self.rows: list[_Row] = []

    def walk(self) -> list[_Row]:
        """The rows, in model order."""
        self._below([-1], "")
        return self.rows

    def _below_name(self, parent: int, node: int) -> str:
        """A layer's name relative to its parent; its full path with ``*`` for numbers if that does not extend the
        parent's.
        """
        name = self._layer[node]
        prefix = f"{self._layer[parent]}." if parent >= 0 else ""
        return name[len(prefix) :] if name.startswith(prefix) else fold_pattern(name)

    def _below(self, nodes: list[int], parent: str) -> None:
        """Add the rows below a set of equal layers."""
        by_name: dict[str, list[int]] = {}
        for node in nodes:
            for child in self._children.get(node, []):
                name = self._below_name(node, child) if len(nodes) > 1 else self._layer[child]
                by_name.setdefault(name, []).append(child)
        sets_of_shape: dict[tuple[str, int], list[list[int]]] = {}
        for name, equals in by_name.items():
            sets_of_shape.setdefault((fold_pattern(name), self._shape[equals[0]]), []).append(equals)
        patterns = [pattern for pattern, _ in sets_of_shape]
        largest = {
            pattern: max(len(sets) for (item, _), sets in sets_of_shape.items() if item == pattern)
            for pattern in patterns
        }
        rows: list[_Row] = []
        for (pattern, _), sets in sets_of_shape.items():
            other = len(sets) < largest[pattern] and largest[pattern] >= LEAST
            rows += self._group(sets, parent, "other parts" if other else "")
        for row in sorted(rows, key=lambda row: min(row.nodes)):
            self.rows.append(row)
            self._below(row.nodes, row.label)

    def _group(self, sets: list[list[int]], parent: str, note: str) -> list[_Row]:
        """The rows of layers with the same structure; each is a set if their parents are folded."""
        times = np.array([self._times[nodes].mean(axis=0) for nodes in sets])
        groups = equal_groups(times, LEAST) if len(sets) >= LEAST else []
        main = np.median(times[max(groups, key=len)], axis=0) if groups else None
        ungrouped = set(range(len(sets))).difference(*groups)
        rows = []
        for group in [*groups, *([index] for index in sorted(ungrouped))]:
            nodes = [node for index in group for node in sets[index]]
            difference = note
            if not difference and main is not None and group is not max(groups, key=len):
                # the phase in which it differs the most from its equals
                median = np.median(times[group], axis=0)
                kind = int(np.abs(median - main).argmax())
                change = f"{100 * (median[kind] / main[kind] - 1):+.0f} %" if main[kind] else "only here"
                difference = f"{self._kinds[kind]} {change}"
            rows.append(_Row(fold_label([self._layer[node] for node in nodes]), parent, nodes, difference))
        return rows


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


def _heaps(times: Floats, min_blocks: int) -> npt.NDArray[np.bool_] | None:
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
            is_low: npt.NDArray[np.bool_] = values <= low[-1]
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
        return self.select.of(self._folding(rows).marked(rows) if self.select.fold else rows)

    def printed(self) -> pd.DataFrame:
        """The selected rows as they are printed: down to `depth`, and where equal blocks are folded, one row for all,
        with the columns of `nvprof_kit._analysis.layers.fold.COLUMNS`.
        """
        rows = self.select.among(self.rows)
        if self.depth is not None:
            rows = rows[[self.blocks.depths.get(layer, 0) < self.depth for layer in rows["layer"]]]
        return self.select.sorted(self._folding(rows).rows(rows, self.time, self.join))

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

    def _folding(self, rows: pd.DataFrame) -> Folding:
        return Folding.of(self.blocks.among(set(rows["layer"])), self.select.fold)


def computing_blocks(operations: Operations, is_wanted: npt.NDArray[np.bool_]) -> Blocks:
    """The layers with their compute times, as `nvprof_kit._analysis.layers.fold.fold` compares them.

    Args:
        operations: The operations; communication is excluded if their names were read.
        is_wanted: The operations to include, shape ``(n,)``.
    """
    import pandas as pd

    trace = operations.trace
    computing = is_wanted & ~operations.classes.is_a("comm") if "name" in trace.ops else is_wanted
    layer, phase = op_owners(operations.attribution)
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": trace.ops["end_ns"] - trace.ops["start_ns"]})
    self_ns = frame[computing].groupby(["layer", "phase"], observed=True)["ns"].sum()
    parents = layer_parents(operations.attribution.ranges)
    return Blocks.of(
        {(str(layer_name), str(of)): float(ns) for (layer_name, of), ns in self_ns.items()}, parents, parents
    )


EACH = ("median", "min", "max")
"""The columns that `fold_ranked` adds, with the unit of the cost behind them: those of one of the folded rows."""


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
        The rows, the costliest first. The layer of a folded row is ``layers.0-79 x80``, and `EACH` is the cost of one
        of its rows. The column ``unlike`` says how a row differs from its equals. Without anything to fold, the rows as
        they are.
    """
    import pandas as pd

    if folds is False or "layer" not in rows or len(rows) < LEAST:
        return rows
    groups, differences = _groups(rows, columns, cost, equal_columns or (cost,))
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
        records.append({**_joined(rows.iloc[group], columns, cost, unit), "unlike": differences.get(group[0], "")})
    each = [f"{name}_{unit}" for name in EACH]
    table = pd.DataFrame(records, columns=[*rows.columns, *each, "unlike"])
    for name in rows.columns:
        table[name] = table[name].astype(rows[name].dtype)
    table[each] = table[each].astype("Int64")
    ranked: pd.DataFrame = table.sort_values(cost, ascending=False, kind="stable", key=abs, ignore_index=True)
    return ranked


def mark_ranked(rows: pd.DataFrame, columns: Columns, cost: str, equal_columns: Sequence[str] = ()) -> pd.DataFrame:
    """Add the columns ``folded_into``, the label of the folded row, and ``unlike``, unless there is one."""
    if "layer" not in rows:
        return rows
    groups, note_of_row = _groups(rows, columns, cost, equal_columns or (cost,))
    layers = rows["layer"].astype(str).tolist()
    into = [""] * len(rows)
    for group in groups:
        for row_number in group:
            into[row_number] = fold_label([layers[member] for member in group])
    differences = [note_of_row.get(row_number, "") for row_number in range(len(rows))]
    marked: pd.DataFrame = rows.assign(folded_into=np.array(into, dtype=object))
    return marked if "unlike" in rows else marked.assign(unlike=np.array(differences, dtype=object))


def _groups(
    rows: pd.DataFrame, columns: Columns, cost: str, alike_by: Sequence[str]
) -> tuple[list[list[int]], dict[int, str]]:
    """The places of the rows that fold together, and how rows differ from their equals."""
    layers = rows["layer"].astype(str).tolist()
    names = [name for name in rows.columns if name != "layer" and _fold_of(rows, columns, str(name)) == "key"]
    keys = [rows[name].astype(str).tolist() for name in names]
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


def _fold_of(rows: pd.DataFrame, columns: Columns, name: str) -> Fold:
    """How a column folds: what is no number identifies the row."""
    if rows[name].dtype.kind not in "iuf":
        return "key"
    column = column_of(columns, name)
    return "sum" if column is None else column.fold


def _joined(group: pd.DataFrame, columns: Columns, cost: str, unit: str) -> dict[Any, Any]:
    """One row for several."""
    row = dict(group.iloc[0].to_dict())
    for name, values in group.items():
        how = _fold_of(group, columns, str(name))
        if how in ("key", "first") or values.isna().all():
            continue
        figure = values.agg(how)
        row[name] = round(figure) if values.dtype.kind in "iu" else figure
    figures = (group[cost].median(), group[cost].min(), group[cost].max())
    label = f"{fold_label(group['layer'].astype(str).tolist())} x{len(group)}"
    return {
        **row,
        "layer": label,
        **{f"{name}_{unit}": round(figure) for name, figure in zip(EACH, figures, strict=True)},
    }
