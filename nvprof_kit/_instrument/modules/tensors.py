"""Finds the autograd nodes that created the tensors in a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from nvprof_kit._instrument.compile.uncompiled import uncompiled, unseen

plain: set[type] = {type(None), bool, int, float, str}
"""Types known to hold no tensors; grows as others are found."""

_MOST = 10_000
"""Maximum number of values to search; also ends the search of a structure that contains itself."""

_Parts = Callable[[Any], Iterable[Any]]


@uncompiled
def grad_nodes(values: list[Any]) -> list[Any]:
    """The autograd nodes that created the tensors in values, in nested lists, tuples, mappings and dataclasses.

    For a view, this includes the node of its base: an in-place operation on the view later replaces the view's own
    node.

    Args:
        values: The values to search; the list is modified.
    """
    nodes = []
    for value in values:  # the list grows during the loop
        kind = type(value)
        try:
            parts_of = _kinds[kind]
        except KeyError:
            parts_of = _learn(kind)
        if parts_of is _of_tensor:
            node = value.grad_fn
            if node is not None:
                nodes.append(node)
                if value._is_view() and (made := value._base.grad_fn) is not None:
                    nodes.append(made)
        elif parts_of is not None and len(values) < _MOST:
            values += parts_of(value)
    return nodes


def _of_tensor(_tensor: Any) -> tuple[Any, ...]:
    return ()


def _of_sequence(items: Any) -> Iterable[Any]:
    return items  # type: ignore[no-any-return]


def _of_mapping(mapping: Any) -> Iterable[Any]:
    return mapping.values()  # type: ignore[no-any-return]


def _of_dataclass(record: Any) -> Iterable[Any]:
    return [getattr(record, field.name, None) for field in fields(record)]


@unseen
def _learn(kind: type) -> _Parts | None:
    """A function that returns the parts of a value of this type; None if no tensors can be found in it."""
    parts_of: _Parts | None = None
    if issubclass(kind, torch.Tensor):
        parts_of = _of_tensor
    elif issubclass(kind, (list, tuple)):
        parts_of = _of_sequence
    elif issubclass(kind, Mapping):
        parts_of = _of_mapping
    elif is_dataclass(kind):
        parts_of = _of_dataclass
    else:
        plain.add(kind)
    _kinds[kind] = parts_of
    return parts_of


_kinds: dict[type, _Parts | None] = {}
