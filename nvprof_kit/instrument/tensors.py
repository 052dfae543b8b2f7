"""Which autograd nodes made the tensors in a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_MAX_DEPTH = 8
"""Deeper nesting is not searched; it also ends the search of a structure that holds itself."""

_Search = Callable[[Any, list[Any], int], None]


def grad_nodes(value: Any) -> list[Any]:
    """The autograd nodes that made the tensors in a value: in nested lists, tuples, mappings and dataclasses.

    A view comes with the node of its base too: an in-place operation on the view later replaces the view's own node.
    """
    nodes: list[Any] = []
    _search_any(value, nodes, 0)
    return nodes


def _search_any(value: Any, nodes: list[Any], depth: int) -> None:
    kind = type(value)
    search = _searches.get(kind)
    if search is None:
        search = _searches[kind] = _search_of(kind)
    search(value, nodes, depth)


def _search_tensor(tensor: Any, nodes: list[Any], _depth: int) -> None:
    node = tensor.grad_fn
    if node is not None:
        nodes.append(node)
        if tensor._is_view() and (made := tensor._base.grad_fn) is not None:
            nodes.append(made)


def _search_items(items: Any, nodes: list[Any], depth: int) -> None:
    if depth < _MAX_DEPTH:
        for item in items:
            _search_any(item, nodes, depth + 1)


def _search_mapping(mapping: Any, nodes: list[Any], depth: int) -> None:
    _search_items(mapping.values(), nodes, depth)


def _search_dataclass(record: Any, nodes: list[Any], depth: int) -> None:
    _search_items([getattr(record, field.name, None) for field in fields(record)], nodes, depth)


def _search_nothing(_value: Any, _nodes: list[Any], _depth: int) -> None:
    pass


def _search_of(kind: type) -> _Search:
    if issubclass(kind, torch.Tensor):
        return _search_tensor
    if issubclass(kind, (list, tuple)):
        return _search_items
    if issubclass(kind, Mapping):
        return _search_mapping
    return _search_dataclass if is_dataclass(kind) else _search_nothing


_searches: dict[type, _Search] = {}
