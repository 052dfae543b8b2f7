"""`annotate_model`: range the layers of a model with one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument.compile.hidden import keep_out
from nvprof_kit._instrument.compile.inductor import range_kernels
from nvprof_kit._instrument.memory.marks import Read, read_cuda
from nvprof_kit._instrument.modules.again import replace_in_notebook
from nvprof_kit._instrument.modules.annotation import Annotation
from nvprof_kit._instrument.modules.blocks import Part, children, descendants, find_blocks, is_list
from nvprof_kit._instrument.modules.calls import Calls
from nvprof_kit._instrument.modules.checkpointing import range_recomputes
from nvprof_kit._instrument.modules.kinds import class_name, unwrapped
from nvprof_kit._instrument.modules.ranged import Compiled, Ranged, annotated
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.layer import Family, Layer
from nvprof_kit._instrument.ranks import mark_rank
from nvprof_kit.errors import UsageError
from nvprof_kit.names import layer_index, strip_wrappers

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

    def __init__(
        self, model: nn.Module, parts: list[Part], *, backward: bool, root: str, compiled_parts: bool = False
    ) -> None:
        self.aliases: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._ranged: dict[str, Ranged] = {}
        self._warned = False
        self._parts_ranged = False
        self._choose(parts, backward, root)
        if compiled_parts and state.mode != "off":
            self._range_inside_compiled(root)
        if model not in state.annotated:  # else the base class says so
            self._refuse_ranged_twice()
        self.paths = tuple(self._ranged)
        super().__init__(model)
        self._register(model)

    def _choose(self, parts: list[Part], backward: bool, root: str) -> None:
        chosen: dict[int, str] = {}
        for path, module in parts:
            name = strip_wrappers(path) or root
            if id(module) in chosen:
                self.aliases[name] = chosen[id(module)]
            elif isinstance(module, torch.jit.ScriptModule):
                self.skipped[name] = "TorchScript modules take no hooks"
            elif (
                name not in self._ranged
            ):  # the module inside a wrapper bears the wrapper's name: the wrapper is ranged
                chosen[id(module)] = name
                self._ranged[name] = Ranged(name, module, Calls(Layer(name, backward=backward)))

    def _range_inside_compiled(self, root: str) -> None:
        layers = {path: ranged.calls.layer for path, ranged in self._ranged.items() if ranged.calls.layer is not None}
        family = Family(layers, root)
        for layer in layers.values():
            layer.family = family
        try:
            range_kernels()
            self._parts_ranged = True
        except (ImportError, AttributeError) as error:
            warnings.warn(
                f"this PyTorch's compiler cannot be told to range its kernels ({error}); what it compiles is ranged "
                "from outside",
                stacklevel=4,
            )

    def _refuse_ranged_twice(self) -> None:
        for path, ranged in self._ranged.items():
            module = ranged.module()
            if module in annotated:
                raise UsageError(
                    f"{path} is ranged already, as {annotated[module].path} of another annotated model; annotate the "
                    "outer model alone, or call remove() on the handle of the other annotation first"
                )

    def _register(self, model: nn.Module) -> None:
        for ranged in self._ranged.values():
            module = ranged.module()
            if module is not None:
                annotated[module] = ranged

    def _install(self, owner: Any) -> list[Any]:
        mark_rank()
        keep_out(self)
        range_recomputes()
        compiled = Compiled(owner)
        self._warn_of_lost(compiled)
        return [hook for ranged in self._ranged.values() for hook in ranged.install(compiled)]

    def pause(self) -> bool:
        """Take the hooks out while torch.compile traces; says whether there were any."""
        had = bool(self._hooks)
        self.sleep()
        return had

    def resume(self) -> None:
        """Put the hooks back after a `pause`, each where it belongs now that more may be compiled."""
        owner = self._owner()
        if owner is not None and state.backend is not None and state.annotated.get(owner) is self:
            self.wake()

    def remove(self) -> None:
        """Take the annotation back; a second call does nothing. It may be annotated again afterwards."""
        super().remove()
        self._close()
        for ranged in self._ranged.values():
            module = ranged.module()
            if module is not None and annotated.get(module) is ranged:
                del annotated[module]

    def _close(self) -> None:
        """Close the ranges of the calls that run on this thread while the annotation is taken back."""
        backend = state.backend
        if backend is None:
            return
        layers = {ranged.calls.layer for ranged in self._ranged.values()}
        for owner in reversed(list(backend.thread.here.owners)):
            if owner in layers:
                backend.close(owner)

    @property
    def inside_compiled(self) -> tuple[str, ...]:
        """Paths of the modules inside what torch.compile compiles as a whole: they have ranges only where its graph
        breaks, and their kernels belong to the compiled module around them. A compiled function that calls the model
        is not seen; `never_entered` tells of the modules that it swallows.
        """
        owner = self._owner()
        return () if owner is None else self._inside(Compiled(owner))

    def _inside(self, compiled: Compiled) -> tuple[str, ...]:
        return tuple(path for path, ranged in self._ranged.items() if ranged.module() in compiled.inside)

    def _warn_of_lost(self, compiled: Compiled) -> None:
        """Warn, once, where whole blocks are inside a compiled module."""
        layers = {layer_index(path) for path in self._inside(compiled)} - {-1}
        regions = {ranged.path for ranged in self._ranged.values() if ranged.module() in compiled.regions}
        if self._parts_ranged or self._warned or len(layers) < 2 or any(layer_index(path) != -1 for path in regions):
            return
        self._warned = True
        warnings.warn(
            f"torch.compile compiles {len(layers)} layers into one, so their kernels belong to "
            f"{', '.join(sorted(regions)) or 'the compiled module'} and to no layer (see inside_compiled); "
            "compile block by block to keep the layers (for block in model.layers: block.compile()), or annotate with "
            "compiled_parts=True before",
            stacklevel=2,
        )

    def never_entered(self) -> list[str]:
        """Paths of the modules not called while ranges were emitted: dead, compiled, or called past ``__call__``."""
        return [path for path, ranged in self._ranged.items() if not ranged.calls.entered]


def annotate_model(
    model: nn.Module,
    *,
    select: Select | None = None,
    depth: int | str | None = None,
    backward: bool = True,
    root: str | None = None,
    memory: bool | Read = False,
    compiled_parts: bool = False,
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
        compiled_parts: Range the modules inside what torch.compile compiles after this call, too: the compiler then
            writes ranges between the kernels that it launches, and its caches keep such code apart.
        memory: Have the ranges of layers carry what PyTorch's CUDA allocator holds at each begin and end, to an
            attached tool; or what a function reads, as `memory_marks.Read`. It holds for the whole process and stays.

    Returns:
        The handle. As a context manager it takes the annotation back at the end.

    Raises:
        UsageError: The model or a module of it is annotated already, nothing matches ``select``, or the options
            contradict each other. In a notebook the annotation of the same model is replaced instead, so that a cell
            can be run again.
    """
    top = Part("", model)
    if select is not None and depth is not None:
        raise UsageError("annotate_model takes select= or depth=, not both")
    if memory:
        state.carry_memory(read_cuda if memory is True else memory)
    if select is not None:
        parts = _selected(top, select)
    elif depth is not None:
        parts = [top, *descendants(top, _levels(depth))]
    else:
        parts = _by_structure(top)
    root = root or class_name(unwrapped(model))
    replace_in_notebook(model)
    return ModelAnnotation(model, parts, backward=backward, root=root, compiled_parts=compiled_parts)


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
