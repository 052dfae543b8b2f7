"""Orders layers as in the model: parents before children; siblings by number if they have one, else by first
execution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from nvprof_kit._analysis.attribution.nesting import NONE, outer_layers
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit.names import LAYER_CATEGORIES, Category


def parents(ranges: Ranges, layers: list[str]) -> dict[str, str]:
    """The parent of each layer, '' at the top.

    The parent is the layer whose forward most often encloses this layer's forward; if none does, the longest other
    layer path that is a prefix of this one. Cycles, which a module called from two places can cause, are broken.
    """
    inner, outer = _enclosed_forwards(ranges)
    pairs, counts = np.unique(np.stack([inner, outer]), axis=1, return_counts=True)
    return parents_of(
        layers,
        (
            (ranges.names[one].text, ranges.names[around].text if around >= 0 else "", count)
            for (one, around), count in zip(pairs.T.tolist(), counts.tolist(), strict=True)
        ),
    )


def parents_of(layers: Iterable[str], enclosed: Iterable[tuple[str, str, int]]) -> dict[str, str]:
    """The same, from counts of enclosing layers: (layer, the enclosing layer or '', count)."""
    layers = list(layers)
    seen: dict[str, Counter[str]] = {}
    for child, holder, count in enclosed:
        if child != holder:
            seen.setdefault(child, Counter())[holder] += count
    known = set(layers)
    parent = {layer: seen[layer].most_common(1)[0][0] if layer in seen else "" for layer in layers}
    for layer in layers:
        if not parent[layer]:
            parts = layer.split(".")
            prefixes = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
            parent[layer] = next((prefix for prefix in prefixes if prefix in known), "")
    for layer in layers:
        _cut_circle(layer, parent)
    return parent


def with_ancestors(layer: str, parent: Mapping[str, str]) -> list[str]:
    """A layer and its ancestors, outermost first."""
    found = [layer]
    while holder := parent.get(found[-1], ""):
        found.append(holder)
    return found[::-1]


def layer_parents(ranges: Ranges) -> dict[str, str]:
    """`parents` of every layer that has a range."""
    return parents(ranges, list(dict.fromkeys(name.text for name in ranges.names if name.category in LAYER_CATEGORIES)))


def _enclosed_forwards(ranges: Ranges) -> tuple[np.ndarray, np.ndarray]:
    """Names (as indices) of the forward ranges and of the enclosing layer range of each, `NONE` if there is none."""
    forward = np.flatnonzero(ranges.is_one_of((Category.FORWARD,)) & (ranges.phase == Category.FORWARD.value))
    around = outer_layers(ranges.layer_range, ranges.nesting)[forward]
    return ranges.name[forward], np.where(around >= 0, np.append(ranges.name, NONE)[around], NONE)


def _cut_circle(layer: str, parent: dict[str, str]) -> None:
    seen = {layer}
    current = layer
    while parent[current]:
        if parent[current] in seen:
            parent[current] = ""
            return
        current = parent[current]
        seen.add(current)


def model_order(ranges: Ranges, layers: list[str], parent: dict[str, str]) -> dict[str, int]:
    """The position of each layer in the model, in depth-first preorder."""
    first = _first_seen(ranges)
    children: dict[str, list[str]] = {}
    for layer in layers:
        children.setdefault(parent[layer], []).append(layer)
    place: dict[str, int] = {}
    waiting = _siblings(children.get("", []), first)[::-1]
    while waiting:
        layer = waiting.pop()
        place[layer] = len(place)
        waiting.extend(_siblings(children.get(layer, []), first)[::-1])
    return place


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
            (0, int(part)) if part.isdecimal() else (1, appeared[".".join(parts[: length + 1])])
            for length, part in enumerate(parts)
        )

    return sorted(layers, key=place)


def _first_seen(ranges: Ranges) -> dict[str, int]:
    """When each layer first ran: its first forward, or, after all of those, backward order for layers without a forward
    in the capture.
    """
    is_layer = np.flatnonzero(ranges.is_one_of(LAYER_CATEGORIES))
    late = int(ranges.end.max(initial=0)) + 1
    first: dict[str, int] = {}
    backward = ranges.is_one_of((Category.BACKWARD, Category.RECOMPUTE))
    for only_backward in (False, True):
        chosen = is_layer[backward[is_layer] == only_backward]
        names, at = np.unique(ranges.name[chosen], return_inverse=True)
        start = np.full(len(names), late, dtype=np.int64)
        np.minimum.at(start, at, ranges.start[chosen])
        for name, when in zip(names.tolist(), start.tolist(), strict=True):
            text = ranges.names[name].text
            # backward runs in reverse order
            first.setdefault(text, late + late - when if only_backward else when)
    return first
