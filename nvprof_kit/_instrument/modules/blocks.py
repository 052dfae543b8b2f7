"""Which modules of a model are its layers: the user's selection, or by structure, not by name.

A *block* is a repeated part of the model: an element of a list of composite modules of one class (for example with a
norm and a projection, or with attention and a feed-forward part), or such modules as sibling attributes. In nested
lists, the outer elements are the blocks (the experts of a mixture are not), unless these are stages: modules with most
of their weights in a list of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from nvprof_kit.errors import UsageError, require
from nvprof_kit.names import WRAPPER_PARTS, encodable, strip_wrappers

_STAGE_SHARE = 0.5
"""Minimum share of an element's weights in its own list for the element to be a stage instead of a block."""


_LEAVES = 1_000_000

Select = type | tuple[type, ...] | str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Which modules to range: classes, path patterns, or a predicate of path and module."""


class Submodule(NamedTuple):
    """A module and its path in the model."""

    path: str
    module: nn.Module


def select_modules(model: nn.Module, select: Select | None, depth: int | str | None) -> list[Submodule]:
    """The modules to range; see `loop.annotate.annotate_model`. The components of a pipeline are a ``ModuleDict``.

    Raises:
        UsageError: The options contradict each other, or match nothing.
    """
    if select is not None and depth is not None:
        raise UsageError("annotate_model takes select= or depth=, not both")
    if select is not None:
        return _selected(model, select)
    tops = list(children(Submodule("", model))) if is_list(model) else [Submodule("", model)]
    if depth is None:
        return [submodule for top in tops for submodule in by_structure(top)]
    levels = _LEAVES if depth == "leaf" else depth
    if not isinstance(levels, int) or levels < 0:
        raise UsageError(f"depth={depth!r} is neither a number of levels nor 'leaf'")
    return [submodule for top in tops for submodule in (top, *descendants(top, levels))]


def children(submodule: Submodule) -> Iterator[Submodule]:
    """The called children of a module: lists are replaced by their elements, wrappers by the wrapped module."""
    for name, inner in named_children(submodule):
        if name in WRAPPER_PARTS or is_list(inner.module):
            yield from children(inner)
        else:
            yield inner


def named_children(submodule: Submodule) -> Iterator[tuple[str, Submodule]]:
    """The children of a module by name; a child with two names occurs twice."""
    for name, child in submodule.module._modules.items():
        if child is not None:
            yield name, Submodule(f"{submodule.path}.{name}" if submodule.path else name, child)


def descendants(submodule: Submodule, depth: int) -> Iterator[Submodule]:
    """The called modules below a module, up to a depth."""
    if depth > 0:
        for child in children(submodule):
            yield child
            yield from descendants(child, depth - 1)


def is_list(module: nn.Module) -> bool:
    """Whether a module is only a container and is never called."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def find_blocks(root: Submodule) -> list[Submodule]:
    """The repeated blocks of a model in model order; empty if there are none."""
    return _blocks_below(root, at_least=2) or _blocks_below(root, at_least=1)


class _Group(NamedTuple):
    """Children of a module that may repeat: the elements of a list, or all children that are plain attributes."""

    elements: list[Submodule]
    container: nn.Module | None


def _groups(submodule: Submodule) -> list[_Group]:
    groups = []
    attributes: list[Submodule] = []
    for name, inner in named_children(submodule):
        if isinstance(inner.module, nn.Sequential) or is_list(inner.module):
            groups.append(_Group(list(children(inner)), inner.module))
        elif name in WRAPPER_PARTS:
            groups += _groups(inner)
        else:
            attributes.append(inner)
    return [*groups, _Group(attributes, None)]


def _blocks_below(submodule: Submodule, at_least: int) -> list[Submodule]:
    """Blocks below a module; a list needs at least this many modules of one class."""
    groups = _groups(submodule)
    enough = at_least
    if any(group.container is not None and _repeated(group, at_least) for group in groups):
        enough = 1  # next to a list of blocks, a list with one element also counts
    blocks: list[Submodule] = []
    for group in groups:
        repeated = _repeated(group, enough)
        for element in group.elements:
            inner = _blocks_below(element, at_least)
            if element not in repeated or (inner and (group.container is None or _is_stage(element, inner))):
                blocks += inner
            else:
                blocks.append(element)
    return blocks


def _repeated(group: _Group, at_least: int) -> list[Submodule]:
    """The blocks in a group: all composite elements, if enough of them have the same class."""
    composite = [element for element in group.elements if _is_composite(element.module)]
    counts = Counter(type(element.module) for element in composite)
    enough = at_least if group.container is not None and is_list(group.container) else 2
    return composite if counts and max(counts.values()) >= enough else []


def _is_composite(module: nn.Module) -> bool:
    """Whether a module is composite.

    It has weights in modules of more than one class, such as a projection and a norm. Norms may have no weights, so
    several children of different classes with weights in submodules, such as attention and feed-forward, also count.
    """
    owners = [inner for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None]
    composites = [child for child in module.children() if any(map(_weights, child.children()))]
    return any(len(set(map(type, modules))) > 1 for modules in (owners, composites))


def _is_stage(element: Submodule, blocks: list[Submodule]) -> bool:
    """Whether most weights of an element are in its own list of blocks."""
    lists = [child for child in element.module.children() if isinstance(child, (nn.ModuleList, nn.Sequential))]
    list_ids = {id(module) for container in lists for module in container.children()}
    block_weights = sum(_weights(block.module) for block in blocks if id(block.module) in list_ids)
    return block_weights >= _STAGE_SHARE * _weights(element.module) > 0


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


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
    blocks = {strip_wrappers(block.path): class_name(block.module) for block in find_blocks(Submodule("", model))}
    containers: dict[str, set[str]] = {}
    for path, name in blocks.items():
        containers.setdefault(name, set()).add(_list_of(path))
    kinds = {
        path: f"{name} in {_list_of(path)}" if len(containers[name]) > 1 else name for path, name in blocks.items()
    }
    matched: dict[str, set[str]] = {pattern: set() for pattern in rules or {}}
    for path, module in model.named_modules(remove_duplicate=False):  # parents before children
        bare = strip_wrappers(path)
        if not bare or is_list(module):  # a list is never called
            continue
        parts = bare.split(".")
        enclosing = [".".join(parts[:count]) for count in range(1, len(parts))]
        fitting = [
            pattern
            for pattern in rules or {}
            if (fnmatchcase(class_name(module), pattern) or fnmatchcase(bare, encodable(pattern)))
            and matched[pattern].isdisjoint(enclosing)
        ]
        for pattern in fitting:  # also those after the first: none of them matches inside this module
            matched[pattern].add(bare)
        if fitting and rules:
            kinds[bare] = encodable(rules[fitting[0]])
    return kinds


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


def _list_of(path: str) -> str:
    """A block's path with a star for every number, without a final number."""
    parts = ["*" if name.isdecimal() else name for name in path.split(".")]
    return ".".join(parts[:-1] if parts[-1] == "*" else parts)


def by_structure(top: Submodule) -> list[Submodule]:
    """The modules to range by default: blocks and their children, and what is outside the blocks."""
    blocks = {submodule.path for submodule in find_blocks(top)}
    ancestors = {".".join(path.split(".")[:end]) for path in blocks for end in range(path.count(".") + 1)}

    def below(submodule: Submodule) -> Iterator[Submodule]:
        for child in children(submodule):
            yield child
            if child.path in blocks:
                yield from children(child)
            elif child.path in ancestors:
                yield from below(child)

    return [top, *(submodule for submodule in below(top) if not isinstance(submodule.module, nn.Identity))]


def _selected(model: nn.Module, select: Select) -> list[Submodule]:
    named = model.named_modules(remove_duplicate=False)
    called = [(path, strip_wrappers(path), module) for path, module in named if not is_list(module)]
    if isinstance(select, (type, tuple)) and all(isinstance(kind, type) for kind in _listed(select)):
        classes = tuple(_listed(select))
        submodules = [Submodule(path, module) for path, _, module in called if isinstance(module, classes)]
    elif isinstance(select, str) or not callable(select):
        patterns = _listed(require(select, Iterable, "annotate_model: select", "classes, patterns or a predicate"))
        for pattern in patterns:
            require(pattern, str, "annotate_model: select: a pattern", "a text")
        submodules = [
            Submodule(path, module)
            for path, bare, module in called
            if any(fnmatchcase(bare, pattern) for pattern in patterns)
        ]
    else:
        submodules = [Submodule(path, module) for path, bare, module in called if select(bare, module)]
    if not submodules:
        raise UsageError(f"select={select!r} matches no module of {type(model).__name__}; see named_modules()")
    return submodules


def _listed(select: Any) -> list[Any]:
    return [select] if isinstance(select, (str, type)) else list(select)
