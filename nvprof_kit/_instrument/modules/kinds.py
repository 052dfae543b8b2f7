"""What kind of block each block of a model is: by class, by the list that holds it, or as the user says."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from nvprof_kit._instrument.modules.blocks import Part, find_blocks
from nvprof_kit.names import WRAPPER_PARTS, encodable, strip_wrappers


def block_kinds(model: nn.Module, rules: Mapping[str, str] | None = None) -> dict[str, str]:
    """The kind of each block, by path.

    A kind is the block's class; where blocks of one class lie in several lists, as the spatial and the temporal blocks
    of a video transformer do, the list is named too: ``STDiT3Block in spatial_blocks``.

    Args:
        model: The model.
        rules: Kinds by a pattern of path or class name, as by `fnmatch`: ``{"*.temporal": "temporal"}``. The first
            that matches counts, before what the model tells; it may name modules that are no blocks. A star matches
            dots too, but what lies in a module that a pattern matched is not matched by it again:
            ``transformer_blocks.*`` are the blocks, without their parts.
    """
    blocks = {strip_wrappers(part.path): class_name(part.module) for part in find_blocks(Part("", model))}
    holders: dict[str, set[str]] = {}
    for path, name in blocks.items():
        holders.setdefault(name, set()).add(_holder(path))
    kinds = {path: f"{name} in {_holder(path)}" if len(holders[name]) > 1 else name for path, name in blocks.items()}
    matched: dict[str, set[str]] = {pattern: set() for pattern in rules or {}}
    for path, module in model.named_modules(remove_duplicate=False):  # a module before those in it
        bare = strip_wrappers(path)
        for pattern, kind in (rules or {}).items() if bare else ():
            if fnmatchcase(class_name(module), pattern) or (
                fnmatchcase(bare, encodable(pattern)) and matched[pattern].isdisjoint(_around(bare))
            ):
                matched[pattern].add(bare)
                kinds[bare] = encodable(kind)
                break
    return kinds


def _around(path: str) -> list[str]:
    """The paths of the modules that a module lies in."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def class_name(module: nn.Module) -> str:
    """The class of a module as the user wrote it: ``fully_shard`` puts one of its own in front, ``FSDPBlock``."""
    cls = type(module)
    last = cls.__bases__[-1]
    return last.__name__ if cls.__name__ == f"FSDP{last.__name__}" else cls.__name__


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that wrappers (DDP, torch.compile, …) wrap."""
    for name, child in model.named_children():
        if name in WRAPPER_PARTS:
            return unwrapped(child)
    return model


def _holder(path: str) -> str:
    """Where a block lies: its path with a star for every number, without the last."""
    parts = ["*" if part.isdecimal() else part for part in path.split(".")]
    return ".".join(parts[:-1] if parts[-1] == "*" else parts)
