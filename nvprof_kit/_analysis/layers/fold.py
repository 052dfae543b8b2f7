"""Equal blocks as one row: `layers.0-79`, 80 of them, with the median, the least and the most of one.

Blocks are equal where they lie in the same layer, their paths differ in numbers only, they have the same parts, and
their computing takes alike long in each phase. What is unlike its equals keeps its row. No figure is lost: a folded row
holds the sum of its blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.nesting import Int64Array
from nvprof_kit._analysis.layers.order import with_holders
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

LEAST = 3
"""Equal blocks that are folded, at least."""

MANY = 8
"""Equal blocks from which on a table for reading is folded without being asked."""

COLUMNS = {
    "count": "blocks that the row stands for; 1 where it is a layer's own",
    "median_ns": "median of what one of them takes without communication, which may be waiting, in ns",
    "min_ns": "the least, in ns",
    "max_ns": "the most, in ns",
    "unlike": "in what a row differs from its equals: `forward +38 %`, `other parts`; '' where in nothing",
}
"""The columns that `fold` adds to those of `nvprof_kit._analysis.layers.layers.LayersResult.tree`."""

_PHASES = tuple(category.value for category in LAYER_CATEGORIES)
_SIGMAS, _MAD_TO_SIGMA = 5.0, 1.4826
_OF_PHASE, _OF_BLOCK = 0.10, 0.03
"""Least difference that makes a block unlike its equals: of its time in a phase, and of that in all phases."""

Floats = npt.NDArray[np.float64]
Join = Callable[[str, str, "pd.DataFrame"], "dict[str, Any]"]


@dataclass(frozen=True)
class Blocks:
    """Layers to be compared, each behind the one that holds it.

    Attributes:
        layers: Their paths.
        parents: For each the layer that holds it, '' at the top.
        times: What each computes with all it holds, in ns, shape ``(layers, kinds)``.
        kinds: What the times are of.
    """

    layers: tuple[str, ...]
    parents: tuple[str, ...]
    times: Floats
    kinds: tuple[str, ...] = _PHASES

    @classmethod
    def of(cls, own: Mapping[tuple[str, str], float], parents: Mapping[str, str], layers: Iterable[str]) -> Blocks:
        """Layers by their own times.

        Args:
            own: Time by layer and phase, without what lies in the layers below.
            parents: The layer that holds each layer, '' at the top.
            layers: The layers, in any order.
        """
        chains = [with_holders(layer, parents) for layer in dict.fromkeys(layers) if layer != NO_LAYER]
        place = {layer: row for row, layer in enumerate(dict.fromkeys(one for chain in chains for one in chain))}
        times = np.zeros((len(place), len(_PHASES)))
        for (layer, phase), ns in own.items():
            if layer in place and phase in _PHASES:
                for holder in with_holders(layer, parents):
                    times[place[holder], _PHASES.index(phase)] += ns
        return cls(tuple(place), tuple(parents.get(layer, "") for layer in place), times)

    def with_amounts(self, rows: pd.DataFrame, column: str, what: str) -> Blocks:
        """The same, compared by amounts too, which become times at the rate of all of them.

        Args:
            rows: Rows by layer and phase.
            column: Their column of amounts, each with those of the layers below.
            what: What the amounts are of.
        """
        place = {layer: row for row, layer in enumerate(self.layers)}
        amounts = np.zeros((len(place), len(_PHASES)))
        for layer, phase, amount in zip(rows["layer"], rows["phase"], rows[column], strict=True):
            if layer in place and phase in _PHASES:
                amounts[place[layer], _PHASES.index(phase)] = amount
        if not amounts.sum():
            return self
        amounts *= self.times[:, : len(_PHASES)].sum() / amounts.sum()
        kinds = (*self.kinds, *(f"{phase} {what}" for phase in _PHASES))
        return Blocks(self.layers, self.parents, np.concatenate([self.times, amounts], axis=1), kinds)

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """How many layers hold each layer."""
        depths: dict[str, int] = {}
        for layer, parent in zip(self.layers, self.parents, strict=True):
            depths[layer] = depths[parent] + 1 if parent in depths else 0
        return depths

    def among(self, layers: Container[str]) -> Blocks:
        """Those of some layers; what their holders are not among them lies at the top."""
        kept = [place for place, layer in enumerate(self.layers) if layer in layers]
        names, parents = (tuple(of[place] for place in kept) for of in (self.layers, self.parents))
        return Blocks(names, parents, self.times[kept], self.kinds)


NO_BLOCKS = Blocks((), (), np.zeros((0, len(_PHASES))))
"""No layers: nothing folds."""


@dataclass(frozen=True)
class Folding:
    """Which layers are one row.

    Attributes:
        into: Path of the folded row that holds a layer; layers with a row of their own are not in it.
        unlike: In what a layer differs from its equals, '' where in nothing.
    """

    into: Mapping[str, str]
    unlike: Mapping[str, str]

    @classmethod
    def of(cls, blocks: Blocks, asked: bool | None) -> Folding:
        """Fold the equal ones of some layers.

        Args:
            blocks: The layers.
            asked: Whether that was asked for; None folds where many are equal.
        """
        if asked is False:
            return cls({}, {})
        rows = _folded(blocks, LEAST)
        if asked is None and max((len(row.nodes) for row in rows), default=0) < MANY:
            return cls({}, {})
        of_row = [(row, [blocks.layers[node] for node in row.nodes]) for row in rows]
        return cls(
            {layer: row.label for row, layers in of_row if len(layers) > 1 for layer in layers},
            {layer: row.unlike for row, layers in of_row for layer in layers},
        )

    def marked(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of layers with the columns `folded_into`, the path of the row that holds each, and `unlike`."""
        layer = rows["layer"].astype(object)
        told = {"folded_into": layer.map(dict(self.into)), "unlike": layer.map(dict(self.unlike))}
        made: pd.DataFrame = rows.assign(**{name: one.fillna("").astype(object) for name, one in told.items()})
        return made

    def rows(self, rows: pd.DataFrame, cost: str, join: Join) -> pd.DataFrame:
        """A row for each fold and phase.

        Args:
            rows: Rows by layer and phase, in the model's order.
            cost: The column of times that `COLUMNS` are told of.
            join: Gives the columns of a folded row, by its path and phase, from the rows in it.

        Returns:
            The rows with the columns `COLUMNS`.
        """
        import pandas as pd

        label = [self.into.get(layer, layer) for layer in rows["layer"]]
        place = {one: number for number, one in enumerate(dict.fromkeys(label))}
        several = pd.Series(list(self.into.values()), dtype=object).value_counts().to_dict()
        groups: dict[tuple[int, str], list[int]] = {}
        for row, (path, phase) in enumerate(zip(label, rows["phase"], strict=True)):
            groups.setdefault((place[path], str(phase)), []).append(row)
        made = []
        for (_, phase), members in sorted(groups.items(), key=lambda one: one[0][0]):
            group, path = rows.iloc[members], label[members[0]]
            own = group.iloc[0].to_dict() if path not in several else {**join(path, phase, group), "layer": path}
            each = group[cost]
            told = (several.get(path, 1), round(float(each.median())), int(each.min()), int(each.max()))
            unlike = self.unlike.get(group["layer"].iloc[0], "")
            made.append({**own, "phase": phase, **dict(zip(COLUMNS, (*told, unlike), strict=True))})
        table: pd.DataFrame = pd.DataFrame(made, columns=[*rows.columns, *COLUMNS])
        return table


@dataclass(frozen=True)
class FoldedTree:
    """The model with equal blocks folded.

    Attributes:
        tree: The columns of the tree and `COLUMNS`. The path of a folded row has ranges of numbers, ``layers.0-79``,
            and so have the paths of the rows below it. Its figures are the sums over its blocks.
        line: For each row of the tree that was folded the row of `tree` that holds it.
    """

    tree: pd.DataFrame
    line: Int64Array

    def folding(self, tree: pd.DataFrame) -> Folding:
        """Which layers are one row.

        Args:
            tree: The tree that was folded.
        """
        label, count, unlike = (self.tree[name].tolist() for name in ("layer", "count", "unlike"))
        lines = {layer: place for layer, place in zip(tree["layer"], self.line.tolist(), strict=True)
                 if layer != NO_LAYER}  # fmt: skip
        return Folding(
            {layer: label[place] for layer, place in lines.items() if count[place] > 1},
            {layer: unlike[place] for layer, place in lines.items()},
        )

    def joined(self, values: pd.Series[int], how: str = "sum") -> pd.Series[int]:
        """Another column of the tree for the folded rows: ``sum`` or ``max``; missing where every value is."""
        groups = values.reset_index(drop=True).groupby(self.line)
        made: pd.Series[int] = groups.max() if how == "max" else groups.sum(min_count=1)
        return made


def fold(tree: pd.DataFrame, least: int = LEAST) -> FoldedTree:
    """Fold the equal blocks of a model.

    Args:
        tree: `nvprof_kit._analysis.layers.layers.LayersResult.tree`.
        least: Equal blocks that become one row, at least.
    """
    import pandas as pd

    layers, outside = ([*np.flatnonzero((tree["layer"] == NO_LAYER) == is_outside)] for is_outside in (False, True))
    inside = tree.iloc[layers]
    found = _folded(Blocks(tuple(inside["layer"]), tuple(inside["parent"]), _computing(inside)), least)
    rows = [replace(row, nodes=[int(layers[node]) for node in row.nodes]) for row in found]
    rows += [_Row(NO_LAYER, "", [int(node)]) for node in outside]
    line = np.empty(len(tree), dtype=np.int64)
    for place, row in enumerate(rows):
        line[row.nodes] = place
    keys = ("layer", "phase", "parent", "depth")
    made = tree.drop(columns=list(keys)).reset_index(drop=True).groupby(line).sum()
    texts: dict[str, list[Any]] = {
        "layer": [row.label for row in rows],
        "phase": [tree["phase"].iloc[row.nodes[0]] for row in rows],
        "parent": [row.parent for row in rows],
        "depth": [tree["depth"].iloc[row.nodes[0]] for row in rows],
    }
    work = (tree["total_ns"] - tree["comm_ns"]).to_numpy()
    each = [work[row.nodes] for row in rows]
    told = {
        "count": [len(row.nodes) for row in rows],
        "median_ns": [round(float(np.median(one))) for one in each],
        "min_ns": [int(one.min()) for one in each],
        "max_ns": [int(one.max()) for one in each],
        "unlike": [row.unlike for row in rows],
    }
    table: pd.DataFrame = pd.concat([pd.DataFrame(texts), made, pd.DataFrame(told)], axis=1)
    table = table[[*tree.columns, *COLUMNS]]
    return FoldedTree(table, line)


def most_equal(folded: FoldedTree) -> int:
    """How many blocks the row that stands for the most of them stands for."""
    return int(folded.tree["count"].max()) if len(folded.tree) else 0


@dataclass(frozen=True)
class _Row:
    label: str
    parent: str
    nodes: list[int]
    unlike: str = ""


def _folded(blocks: Blocks, least: int) -> list[_Row]:
    return _Folder(blocks, least).walk()


class _Folder:
    """Walks the model; a node is a place among the layers."""

    def __init__(self, blocks: Blocks, least: int) -> None:
        self._least = max(least, 2)
        self._layer, self._times, self._kinds = blocks.layers, blocks.times, blocks.kinds
        place = {layer: node for node, layer in enumerate(self._layer)}
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(blocks.parents):
            self._children.setdefault(place.get(parent, -1), []).append(node)
        self._shape = self._shapes(len(self._layer))
        self.rows: list[_Row] = []

    def walk(self) -> list[_Row]:
        """The rows, in the model's order."""
        self._below([-1], "")
        return self.rows

    def _shapes(self, nodes: int) -> list[int]:
        """A number for each node that equal structures share: the parts below it, by their names."""
        numbers: dict[tuple[tuple[str, int], ...], int] = {}
        found = [0] * nodes
        for node in reversed(range(nodes)):  # children come behind their parent
            parts = sorted((self._below_name(node, child), found[child]) for child in self._children.get(node, []))
            found[node] = numbers.setdefault(tuple(parts), len(numbers))
        return found

    def _below_name(self, holder: int, node: int) -> str:
        """A layer's name below its holder's; with ``*`` for numbers where its path is no extension of that."""
        name = self._layer[node]
        own = f"{self._layer[holder]}." if holder >= 0 else ""
        return name[len(own) :] if name.startswith(own) else _pattern(name)

    def _below(self, holders: list[int], parent: str) -> None:
        """The rows below some equal layers."""
        by_name: dict[str, list[int]] = {}
        for holder in holders:
            for child in self._children.get(holder, []):
                name = self._below_name(holder, child) if len(holders) > 1 else self._layer[child]
                by_name.setdefault(name, []).append(child)
        alike: dict[tuple[str, int], list[list[int]]] = {}
        for name, nodes in by_name.items():
            alike.setdefault((_pattern(name), self._shape[nodes[0]]), []).append(nodes)
        patterns = [pattern for pattern, _ in alike]
        most = {pattern: max(len(sets) for (one, _), sets in alike.items() if one == pattern) for pattern in patterns}
        rows: list[_Row] = []
        for (pattern, _), sets in alike.items():
            other = len(sets) < most[pattern] and most[pattern] >= self._least
            rows += self._group(sets, parent, "other parts" if other else "")
        for row in sorted(rows, key=lambda one: min(one.nodes)):
            self.rows.append(row)
            self._below(row.nodes, row.label)

    def _group(self, sets: list[list[int]], parent: str, unlike: str) -> list[_Row]:
        """The rows of some layers of one shape; each is a set where their holders are folded."""
        times = np.array([self._times[nodes].mean(axis=0) for nodes in sets])
        groups = equal_groups(times, self._least) if len(sets) >= self._least else []
        main = np.median(times[max(groups, key=len)], axis=0) if groups else None
        rest = set(range(len(sets))).difference(*groups)
        rows = []
        for group in [*groups, *([one] for one in sorted(rest))]:
            nodes = [node for one in group for node in sets[one]]
            said = unlike
            if not said and main is not None and group is not max(groups, key=len):
                said = _difference(np.median(times[group], axis=0), main, self._kinds)
            rows.append(_Row(_label([self._layer[node] for node in nodes]), parent, nodes, said))
        return rows


def _computing(tree: pd.DataFrame) -> Floats:
    """What each row computes in each phase, shape ``(rows, phases)``: a collective waits for other ranks."""
    columns = [
        tree[f"{phase}_ns"].to_numpy() - (tree[f"{phase}_comm_ns"].to_numpy() if f"{phase}_comm_ns" in tree else 0)
        for phase in _PHASES
    ]
    return np.stack(columns, axis=1).astype(np.float64)


def equal_groups(times: Floats, least: int) -> list[list[int]]:
    """Which of some blocks take alike long.

    Where the times lie in two heaps with a wide gap between, as those of local and global attention in turn, each heap
    is looked at alone. In a heap a block is unlike the others where it is further from their median, in any phase, than
    five standard deviations (1.4826 times the median of the distances), a tenth of the phase and 3 % of the block.

    Args:
        times: Of each block in each phase, shape ``(blocks, phases)``.
        least: Blocks that make a group, at least.

    Returns:
        Groups of places in `times`; what is in none is unlike all.
    """
    found: list[list[int]] = []
    waiting = [np.arange(len(times))]
    while waiting:
        members = waiting.pop()
        if len(members) < least:
            continue
        if (halves := _heaps(times[members], least)) is not None:
            waiting += [members[halves], members[~halves]]
            continue
        like = _like(times[members])
        if np.count_nonzero(like) >= least:
            found.append(members[like].tolist())
            waiting.append(members[~like])
    return sorted(found)


def _like(times: Floats) -> npt.NDArray[np.bool_]:
    middle = np.median(times, axis=0)
    far = np.abs(times - middle)
    spread = _MAD_TO_SIGMA * np.median(far, axis=0)
    allowed = np.maximum(np.maximum(_SIGMAS * spread, _OF_PHASE * middle), _OF_BLOCK * middle.sum())
    found: npt.NDArray[np.bool_] = np.all(far <= allowed, axis=1)
    return found


def _heaps(times: Floats, least: int) -> npt.NDArray[np.bool_] | None:
    """The blocks of the lower of two heaps, where there are two in any phase."""
    floor = _OF_BLOCK * float(np.median(times.sum(axis=1)))
    for values in times.T:
        in_order = np.sort(values)
        gaps = np.diff(in_order)[least - 1 : len(values) - least]
        if not len(gaps):
            return None
        place = least + int(gaps.argmax())
        low, high = in_order[:place], in_order[place:]
        gap = float(gaps.max())
        spread = _MAD_TO_SIGMA * max(float(np.median(np.abs(side - np.median(side)))) for side in (low, high))
        if gap > max(_SIGMAS * spread, _OF_PHASE * float(np.median(low)), floor):
            found: npt.NDArray[np.bool_] = values <= low[-1]
            return found
    return None


def _difference(times: Floats, equals: Floats, kinds: Sequence[str]) -> str:
    """The phase in which some times differ the most from their equals', and by how much."""
    kind = int(np.abs(times - equals).argmax())
    if not equals[kind]:
        return f"{kinds[kind]} only here"
    change = 100 * (times[kind] / equals[kind] - 1)
    return f"{kinds[kind]} {change:+.0f} %"


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path)


def _label(paths: Sequence[str]) -> str:
    """Paths that differ in numbers as one: ``stages.0-3.blocks.0-5``."""
    if len(paths) == 1:
        return paths[0]
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(_part(parts) for parts in columns)


def _part(parts: Iterable[str]) -> str:
    different = list(dict.fromkeys(parts))
    return different[0] if len(different) == 1 else numbers_text(sorted(int(part) for part in different))


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers in order as short as they can be said: ``0-79``, ``0-2,4-79``, ``1,3,...,79``."""
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
