"""The ranges of one layer: forward, backward, and recompute under activation checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import Category, layer_index, range_text


class Layer:
    """The ranges of a layer.

    Attributes:
        path: The layer's path without wrappers.
        forward: The range of a call.
        recompute: The range of a call inside a running backward pass.
        backward: The range of the backward pass; None if disabled or if the category is not ``forward``.
        family: The layers of the model; only set if modules in compiled code are ranged.
    """

    __slots__ = ("backward", "family", "forward", "path", "recompute")

    def __init__(self, path: str, category: Category = Category.FORWARD, *, backward: bool = True) -> None:
        layered = category is Category.FORWARD
        self.path = path
        self.forward = _range(path, category)
        self.recompute = _range(path, Category.RECOMPUTE) if layered else self.forward
        self.backward = _range(path, Category.BACKWARD) if layered and backward else None
        self.family: Family | None = None

    def __repr__(self) -> str:
        return f"Layer({self.path!r})"


class Family:
    """The layers of one model by path.

    Args:
        layers: The layers.
        root: Name of the model itself, which is not a prefix of the other paths.
    """

    def __init__(self, layers: Mapping[str, Layer], root: str) -> None:
        self._layers = layers
        self._root = root
        self._found: dict[tuple[str, str], tuple[Layer, ...]] = {}

    def below(self, layer: Layer, path: str) -> tuple[Layer, ...]:
        """The layers from a layer (exclusive) down to a path below it, outermost first."""
        requested = layer.path, path
        if requested not in self._found:
            above = [] if layer.path == self._root else layer.path.split(".")
            parts = path.split(".")
            candidates = (".".join(above + parts[: length + 1]) for length in range(len(parts)))
            self._found[requested] = tuple(self._layers[way] for way in candidates if way in self._layers)
        return self._found[requested]


def _range(path: str, category: Category) -> Range:
    return Range(range_text(path, category), category, layer_index(path))


@lru_cache(maxsize=4096)
def layer_of(path: str, category: Category = Category.FORWARD, backward: bool = True) -> Layer:
    """The layer with this path; cached, so that its ranges are built once."""
    return Layer(path, category, backward=backward)


class RangesCalls:
    """Base of the objects with hooks that range a module's calls."""

    __slots__ = ()


def is_ranged(module: Any) -> bool:
    """Whether our hooks range the module's calls."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), RangesCalls) for hook in hooks)
