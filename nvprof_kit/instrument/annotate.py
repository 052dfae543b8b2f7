"""`annotate_model`: range the layers of a model with one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..names import WRAPPER_PARTS, strip_wrappers
from .annotation import Annotation
from .blocks import Part, children, descendants, find_blocks, is_list
from .calls import Calls, hook_module
from .layer import Layer

Select = type | tuple[type, ...] | str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Which modules to range: classes, patterns of paths, or a predicate of path and module."""

_LEAVES = 1_000_000


class ModelAnnotation(Annotation):
    """The handle of an annotated model.

    Attributes:
        paths: The paths of the ranged modules, in the model's order; the root's is its class name.
        aliases: Other paths of modules that the model holds more than once, with the path under which they are ranged.
        skipped: Paths of modules that were to be ranged and cannot be, with the reason.
    """

    def __init__(self, model: nn.Module, parts: list[Part], *, backward: bool, root: str) -> None:
        self.aliases: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._calls: dict[str, tuple[weakref.ref[nn.Module], Calls]] = {}
        self._choose(parts, backward, root)
        self.paths = tuple(self._calls)
        super().__init__(model)

    def _choose(self, parts: list[Part], backward: bool, root: str) -> None:
        chosen: dict[int, str] = {}
        for path, module in parts:
            name = strip_wrappers(path) or root
            if id(module) in chosen:
                self.aliases[name] = chosen[id(module)]
            elif isinstance(module, torch.jit.ScriptModule):
                self.skipped[name] = "TorchScript modules take no hooks"
            elif name not in self._calls:  # the module inside a wrapper bears the wrapper's name: the wrapper is ranged
                chosen[id(module)] = name
                self._calls[name] = weakref.ref(module), Calls(Layer(name, backward=backward))

    def _install(self, owner: Any) -> list[Any]:
        hooks: list[Any] = []
        for reference, calls in self._calls.values():
            module = reference()
            if module is not None:
                hooks += hook_module(module, calls)
        return hooks

    def never_entered(self) -> list[str]:
        """Paths of the modules not called while ranges were emitted: dead, compiled, or called past ``__call__``."""
        return [path for path, (_, calls) in self._calls.items() if not calls.entered]


def annotate_model(
    model: nn.Module,
    *,
    select: Select | None = None,
    depth: int | str | None = None,
    backward: bool = True,
    root: str | None = None,
) -> ModelAnnotation:
    """Range the layers of a model: each call's forward, its backward, and its recompute under activation checkpointing.

    By default the model's repeated blocks are found by structure, and ranged are the blocks and their direct children,
    and everything beside and around the blocks: embeddings, final norm, head, the modules that hold them, and the model
    itself. A model without repeated blocks has its direct children ranged. Nothing is installed while nobody listens,
    neither an attached tool nor the embedded recorder; outputs, gradients and memory stay what they are.

    Args:
        model: The model; held weakly.
        select: Range these modules and no others: a class or a tuple of classes, a pattern or several
            (``layers.*.mlp``, matched against whole paths as by `fnmatch`), or a predicate of a module's path and the
            module.
        depth: Range the model and so many levels below it, lists not counted; ``"leaf"`` for all levels.
        backward: Range the backward pass.
        root: The name of the model itself, which has no path; by default its class.

    Returns:
        The handle. As a context manager it takes the annotation back at the end.

    Raises:
        UsageError: The model is annotated already, nothing matches ``select``, or the options contradict each other.
    """
    top = Part("", model)
    if select is not None and depth is not None:
        raise UsageError("annotate_model takes select= or depth=, not both")
    if select is not None:
        parts = _selected(top, select)
    elif depth is not None:
        parts = [top, *descendants(top, _levels(depth))]
    else:
        parts = _by_structure(top)
    return ModelAnnotation(model, parts, backward=backward, root=root or type(_unwrapped(model)).__name__)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module that wrappers (DDP, torch.compile, …) wrap."""
    for name, child in model.named_children():
        if name in WRAPPER_PARTS:
            return _unwrapped(child)
    return model


def _levels(depth: int | str) -> int:
    if depth == "leaf":
        return _LEAVES
    if isinstance(depth, int) and depth >= 0:
        return depth
    raise UsageError(f"depth={depth!r} is neither a number of levels nor 'leaf'")


def _by_structure(top: Part) -> list[Part]:
    blocks = {part.path for part in find_blocks(top)}
    around = {".".join(path.split(".")[:end]) for path in blocks for end in range(path.count(".") + 1)}

    def below(part: Part) -> Iterator[Part]:
        for child in children(part):
            yield child
            if child.path in blocks:
                yield from children(child)
            elif child.path in around:
                yield from below(child)

    return [top, *(part for part in below(top) if not isinstance(part.module, nn.Identity))]


def _selected(top: Part, select: Select) -> list[Part]:
    matches = _predicate(select)
    named = top.module.named_modules(remove_duplicate=False)
    called = ((path, module) for path, module in named if not is_list(module))
    found = [Part(path, module) for path, module in called if matches(strip_wrappers(path), module)]
    if not found:
        raise UsageError(f"select={select!r} matches no module of {type(top.module).__name__}; see named_modules()")
    return found


def _predicate(select: Select) -> Callable[[str, nn.Module], bool]:
    if isinstance(select, (type, tuple)) and all(isinstance(kind, type) for kind in _listed(select)):
        classes = tuple(_listed(select))
        return lambda _path, module: isinstance(module, classes)
    if isinstance(select, str) or not callable(select):
        patterns = _listed(select)
        return lambda path, _module: any(fnmatchcase(path, pattern) for pattern in patterns)
    return select


def _listed(select: Any) -> list[Any]:
    return [select] if isinstance(select, (str, type)) else list(select)
