"""Which modules of a model are its layers: found by structure, not by name.

A *block* is what a model repeats: an element of a list of modules of one class that hold more than plain weights (a
norm and a projection, say, or an attention and a feed-forward part), or such modules side by side as attributes. Of
lists inside lists the outer one gives the blocks (the experts of a mixture are no blocks), unless its elements are mere
stages, most of whose weights lie in a list of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from nvprof_kit.names import WRAPPER_PARTS

_STAGE_SHARE = 0.5
"""From this share of its weights in a list of its own on, an element of a list is a stage and no block."""


class Part(NamedTuple):
    """A module of a model, and its path in the model."""

    path: str
    module: nn.Module


def children(part: Part) -> Iterator[Part]:
    """The children of a module that are called: lists are replaced by their elements, wrappers by what they wrap."""
    for name, inner in named_children(part):
        if name in WRAPPER_PARTS or is_list(inner.module):
            yield from children(inner)
        else:
            yield inner


def named_children(part: Part) -> Iterator[tuple[str, Part]]:
    """The children of a module by name; one that it holds twice comes twice."""
    for name, child in part.module._modules.items():
        if child is not None:
            yield name, Part(f"{part.path}.{name}" if part.path else name, child)


def descendants(part: Part, depth: int) -> Iterator[Part]:
    """The called modules below a module, down to so many levels."""
    if depth > 0:
        for child in children(part):
            yield child
            yield from descendants(child, depth - 1)


def is_list(module: nn.Module) -> bool:
    """Whether a module only holds others and is never called."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def find_blocks(root: Part) -> list[Part]:
    """The repeated blocks of a model, in the order of its modules; empty where it repeats nothing of substance."""
    return _blocks_below(root, at_least=2) or _blocks_below(root, at_least=1)


class _Group(NamedTuple):
    """Children of a module that may repeat: the elements of a list, or all that are plain attributes."""

    elements: list[Part]
    holder: nn.Module | None


def _groups(part: Part) -> list[_Group]:
    groups = []
    attributes: list[Part] = []
    for name, inner in named_children(part):
        if isinstance(inner.module, nn.Sequential) or is_list(inner.module):
            groups.append(_Group(list(children(inner)), inner.module))
        elif name in WRAPPER_PARTS:
            groups += _groups(inner)
        else:
            attributes.append(inner)
    return [*groups, _Group(attributes, None)]


def _blocks_below(part: Part, at_least: int) -> list[Part]:
    """Blocks below a module, where a list repeats from so many modules of one class on."""
    groups = _groups(part)
    enough = at_least
    if any(group.holder is not None and _repeated(group, at_least) for group in groups):
        enough = 1  # beside a list of blocks, a list of one is one of blocks too
    blocks: list[Part] = []
    for group in groups:
        repeated = _repeated(group, enough)
        for element in group.elements:
            inner = _blocks_below(element, at_least)
            if element not in repeated or (inner and (group.holder is None or _is_stage(element, inner))):
                blocks += inner
            else:
                blocks.append(element)
    return blocks


def _repeated(group: _Group, at_least: int) -> list[Part]:
    """The elements of a group that are blocks: all that are composite, if enough of them are of one class."""
    composite = [element for element in group.elements if _is_composite(element.module)]
    counts = Counter(type(element.module) for element in composite)
    enough = at_least if group.holder is not None and is_list(group.holder) else 2
    return composite if counts and max(counts.values()) >= enough else []


def _is_composite(module: nn.Module) -> bool:
    """Whether a module holds weights of more than one kind, as a block of a projection and a norm does, or, where norms
    have no weights, several parts that hold theirs in modules of their own, as attention and feed-forward do.
    """
    kinds = {type(part) for part in module.modules() if next(part.parameters(recurse=False), None) is not None}
    parts = {type(part) for part in module.children() if any(_weights(inner) for inner in part.children())}
    return len(kinds) > 1 or len(parts) > 1


def _is_stage(element: Part, blocks: list[Part]) -> bool:
    """Whether an element is little more than the list of blocks that it holds itself."""
    lists = [child for child in element.module.children() if isinstance(child, (nn.ModuleList, nn.Sequential))]
    own = {id(module) for holder in lists for module in holder.children()}
    held = sum(_weights(block.module) for block in blocks if id(block.module) in own)
    return held >= _STAGE_SHARE * _weights(element.module) > 0


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
