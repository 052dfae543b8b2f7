"""The kind of each block of a model: from its class, the list that contains it, or rules of the user."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from nvprof_kit._instrument.modules.blocks import Part, find_blocks, is_list
from nvprof_kit.names import WRAPPER_PARTS, encodable, strip_wrappers


def block_kinds(model: nn.Module, rules: Mapping[str, str] | None = None) -> dict[str, str]:
    """The kind of each block, by path.

    A kind is the block's class. If blocks of one class are in several lists, such as the spatial and the temporal
    blocks of a video transformer, the kind includes the list: ``STDiT3Block in spatial_blocks``.

    Args:
        model: The model.
        rules: Kinds by pattern of path or class name, as by `fnmatch`: ``{"*.temporal": "temporal"}``. The first match
            applies, before the detected kinds, also to modules that are not blocks. A star also matches dots, but a
            pattern that matches a module does not match modules inside it: ``transformer_blocks.*`` matches the
            blocks, not their parts. Lists of modules match nothing.
    """
    blocks = {strip_wrappers(part.path): class_name(part.module) for part in find_blocks(Part("", model))}
    holders: dict[str, set[str]] = {}
    for path, name in blocks.items():
        holders.setdefault(name, set()).add(_holder(path))
    kinds = {path: f"{name} in {_holder(path)}" if len(holders[name]) > 1 else name for path, name in blocks.items()}
    matched: dict[str, set[str]] = {pattern: set() for pattern in rules or {}}
    for path, module in model.named_modules(remove_duplicate=False):  # parents before children
        bare = strip_wrappers(path)
        if not bare or is_list(module):  # a list is never called
            continue
        fitting = [
            pattern
            for pattern in rules or {}
            if (fnmatchcase(class_name(module), pattern) or fnmatchcase(bare, encodable(pattern)))
            and matched[pattern].isdisjoint(_around(bare))
        ]
        for pattern in fitting:  # also those after the first: none of them matches inside this module
            matched[pattern].add(bare)
        if fitting and rules:
            kinds[bare] = encodable(rules[fitting[0]])
    return kinds


def _around(path: str) -> list[str]:
    """The paths of the enclosing modules."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def class_name(module: nn.Module) -> str:
    """The original class name of a module: ``fully_shard`` replaces the class by a subclass, ``FSDPBlock``."""
    cls = type(module)
    last = cls.__bases__[-1]
    return last.__name__ if cls.__name__ == f"FSDP{last.__name__}" else cls.__name__


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers (DDP, torch.compile, …)."""
    for name, child in model.named_children():
        if name in WRAPPER_PARTS:
            return unwrapped(child)
    return model


def _holder(path: str) -> str:
    """A block's path with a star for every number, without a final number."""
    parts = ["*" if part.isdecimal() else part for part in path.split(".")]
    return ".".join(parts[:-1] if parts[-1] == "*" else parts)
