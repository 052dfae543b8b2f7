"""The model as a tree: parents before children; siblings by number if they have one, else by first execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, outer_layers
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._trace.joins import distinct_rows
from nvprof_kit.names import LAYER_CATEGORIES, Category

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True)
class ModelTree:
    """The layers of a model, parents before children.

    Attributes:
        layers: Their paths.
        parents: The path of each layer's parent; '' at the top, and for rows of a table that are no layers.
    """

    layers: Sequence[str]
    parents: Sequence[str]

    @classmethod
    def of_ranges(cls, ranges: Ranges) -> ModelTree:
        """The layers that have ranges, in depth-first preorder."""
        start = np.full(len(ranges.names), np.iinfo(np.int64).max)
        np.minimum.at(start, ranges.name, ranges.start)
        after_all = int(ranges.end.max(initial=0)) + 1
        # when each first ran: its first forward, or after all of those, for layers without one, in backward order
        first: dict[str, int] = {}
        for has_forward in (True, False):
            for name, start_ns in zip(ranges.names, start.tolist(), strict=True):
                if name.category in LAYER_CATEGORIES and (name.category is Category.FORWARD) == has_forward:
                    first.setdefault(name.text, start_ns if has_forward else after_all + after_all - start_ns)
        parent = layer_parents(ranges)
        children: dict[str, list[str]] = {}
        for layer, of in parent.items():
            children.setdefault(of, []).append(layer)
        order: list[str] = []
        stack = _siblings(children.get("", []), first)[::-1]
        while stack:
            order.append(stack.pop())
            stack.extend(_siblings(children.get(order[-1], []), first)[::-1])
        return cls(order, [parent[layer] for layer in order])

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of each layer."""
        return {layer: position for position, layer in enumerate(self.layers)}

    @cached_property
    def parent(self) -> Int64Array:
        """The position of each layer's parent, `NONE` at the top, shape ``(layers,)``."""
        return np.array([self.index.get(parent, NONE) if parent else NONE for parent in self.parents], dtype=np.int64)

    @cached_property
    def depth(self) -> Int64Array:
        """The number of ancestors of each layer, shape ``(layers,)``."""
        depth = np.zeros(len(self.layers), dtype=np.int64)
        for position, parent in enumerate(self.parent.tolist()):
            depth[position] = depth[parent] + 1 if parent >= 0 else 0
        return depth

    def with_nested(self, values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """Sums over each layer and all layers inside it.

        Uses the structure of the model and not the nesting of ranges: a backward pass recomputes a checkpointed block
        inside the range of the submodule that needs it first, but that submodule must not include the time of the
        others.

        Args:
            values: A layer's own values, shape ``(layers, …)``.
        """
        sums: npt.NDArray[_Number] = values.copy()
        for level in range(int(self.depth.max(initial=0)), 0, -1):
            inside = np.flatnonzero(self.depth == level)
            np.add.at(sums, self.parent[inside], sums[inside])
        return sums


def layer_parents(ranges: Ranges) -> dict[str, str]:
    """The parent of each layer that has a range, '' at the top, by `parents_of` from the ranges of its forward."""
    is_in_forward = ranges.phase == ranges.phases.index(Category.FORWARD.value)
    forward = np.flatnonzero(ranges.is_one_of((Category.FORWARD,)) & is_in_forward)
    enclosing = outer_layers(ranges.layer_range, ranges.nesting)[forward]
    outer = np.where(enclosing >= 0, np.append(ranges.name, NONE)[enclosing], NONE)
    (inner_names, outer_names), pair = distinct_rows(ranges.name[forward], outer)
    texts = [*(name.text for name in ranges.names), ""]
    layers = dict.fromkeys(name.text for name in ranges.names if name.category in LAYER_CATEGORIES)
    enclosed = zip(inner_names, outer_names, np.bincount(pair).tolist(), strict=True)
    return parents_of(layers, ((texts[inner], texts[outer], count) for inner, outer, count in enclosed))


def parents_of(layers: Iterable[str], enclosed: Iterable[tuple[str, str, int]]) -> dict[str, str]:
    """The parent of each layer, '' at the top: the layer that most often encloses it, or, if none does, the longest
    other path that is a prefix of its own. Cycles, which a module called from two places can cause, are broken.

    Args:
        layers: The layers.
        enclosed: How often a layer was enclosed: (layer, the enclosing layer or '', count).
    """
    layers = list(layers)
    counts: dict[str, Counter[str]] = {}
    for child, outer, count in enclosed:
        if child != outer:
            counts.setdefault(child, Counter())[outer] += count
    names = set(layers)
    parent = {layer: counts[layer].most_common(1)[0][0] if layer in counts else "" for layer in layers}
    for layer in layers:
        if not parent[layer]:
            parts = layer.split(".")
            prefixes = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
            parent[layer] = next((prefix for prefix in prefixes if prefix in names), "")
    for layer in layers:
        inside, top = {layer}, layer
        while parent[top] and parent[top] not in inside:
            top = parent[top]
            inside.add(top)
        parent[top] = ""  # it is the top already, or closes a cycle
    return parent


def with_ancestors(layer: str, parent: Mapping[str, str]) -> list[str]:
    """A layer and its ancestors, outermost first."""
    path = [layer]
    while parent_layer := parent.get(path[-1], ""):
        path.append(parent_layer)
    return path[::-1]


def _siblings(layers: list[str], first: dict[str, int]) -> list[str]:
    """Sort siblings. By number first, because a capture that begins in the middle of a step can show ``layers.7``
    before ``layers.0``.
    """
    appeared: dict[str, int] = {}
    for layer in layers:
        parts = layer.split(".")
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            appeared[prefix] = min(appeared.get(prefix, first[layer]), first[layer])

    def place(layer: str) -> tuple[tuple[int, int], ...]:
        parts = layer.split(".")
        return tuple(
            (0, int(path_part)) if path_part.isdecimal() else (1, appeared[".".join(parts[: length + 1])])
            for length, path_part in enumerate(parts)
        )

    return sorted(layers, key=place)
