"""Range the layers of a model: which modules, and the handle that holds their hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

import torch
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.compile import range_kernels
from nvprof_kit._instrument.modules.blocks import (
    Submodule,
    children,
    class_name,
    descendants,
    find_blocks,
    is_list,
    unwrapped,
)
from nvprof_kit._instrument.modules.calls import Compiled, Ranged, annotated, followers, wrappers
from nvprof_kit._instrument.patches import pause_while_tracing
from nvprof_kit._instrument.ranges.backward import recomputes
from nvprof_kit._instrument.ranges.ranges import Family, Layer
from nvprof_kit._instrument.ranks import mark_rank
from nvprof_kit._instrument.session import Annotation, Read, Removable, read_cuda, replace_in_notebook
from nvprof_kit.errors import UsageError, require
from nvprof_kit.names import layer_index, strip_wrappers

Select = type | tuple[type, ...] | str | Iterable[str] | Callable[[str, nn.Module], bool]
"""Which modules to range: classes, path patterns, or a predicate of path and module."""

_LEAVES = 1_000_000


class Pipeline(Protocol):
    """An object with modules as components, such as a Diffusers pipeline."""

    @property
    def components(self) -> Mapping[str, Any]:
        """Its components by name; those that are modules are annotated."""


class ModelAnnotation(Annotation):
    """The handle of an annotated model.

    Attributes:
        paths: Paths of the ranged modules in model order; the root's is its class name.
        aliases: Further paths of modules that occur more than once, with the path used for their ranges.
        skipped: Paths of modules that cannot be ranged, with the reason.
        dataloader: The ranged data loader, if `annotate_model` got one.
    """

    def __init__(
        self,
        model: Any,
        submodules: list[Submodule],
        *,
        backward: bool,
        root: str,
        compiled_parts: bool = False,
        components: nn.Module | None = None,
    ) -> None:
        self._components = components
        self.dataloader: Any = None
        self.aliases: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._ranged: dict[str, Ranged] = {}
        self._warned = False
        self._parts_ranged = False
        self._lasting: list[Removable] = []
        names: dict[int, str] = {}
        for path, module in submodules:
            name = strip_wrappers(path) or root
            if id(module) in names:
                self.aliases[name] = names[id(module)]
            elif isinstance(module, torch.jit.ScriptModule):
                self.skipped[name] = "TorchScript modules take no hooks"
            elif name not in self._ranged:  # a wrapper and its inner module share one name; range the wrapper
                if module in annotated and model not in session.annotated:  # else the base class raises
                    raise UsageError(
                        f"{name} is already ranged, as {annotated[module].layer.path} of another annotated model; "
                        "annotate the outer model alone, or call remove() on the handle of the other annotation first"
                    )
                names[id(module)] = name
                self._ranged[name] = Ranged(Layer(name, backward=backward), module)
        self.paths = tuple(self._ranged)
        try:
            if session.mode != "off":
                self._lasting.append(wrappers.hold(self))
                if compiled_parts:
                    self._range_inside_compiled(root)
            super().__init__(model)
        except BaseException:
            self._let_go()
            raise
        for ranged in self._ranged.values():
            module_now = ranged.module()
            if module_now is not None:
                annotated[module_now] = ranged

    def _range_inside_compiled(self, root: str) -> None:
        layers = {path: ranged.layer for path, ranged in self._ranged.items()}
        family = Family(layers, root)
        for layer in layers.values():
            layer.family = family
        try:
            self._lasting.append(range_kernels(self))
            self._parts_ranged = True
        except (ImportError, AttributeError) as error:
            warnings.warn(
                f"this PyTorch's compiler cannot range its kernels ({error}); what it compiles is ranged from outside",
                stacklevel=4,
            )

    def _hold(self, _owner: Any) -> Iterator[Removable]:
        mark_rank()
        yield pause_while_tracing(self)
        yield recomputes.hold(self)
        yield followers.hold(self)

    def _install(self, owner: Any) -> Iterator[Removable]:
        compiled = Compiled(self._components or owner)
        layers = {layer_index(path) for path in self._inside(compiled)} - {-1}
        regions = {path for path, ranged in self._ranged.items() if ranged.module() in compiled.regions}
        layers_have_regions = any(layer_index(path) != -1 for path in regions)
        if len(layers) > 1 and not (self._parts_ranged or self._warned or layers_have_regions):
            self._warned = True
            warnings.warn(
                f"torch.compile compiles {len(layers)} layers into one, so their kernels belong to "
                f"{', '.join(sorted(regions)) or 'the compiled module'} and to no layer (see inside_compiled); "
                "compile block by block to keep the layers (for block in model.layers: block.compile()), or annotate "
                "with compiled_parts=True before",
                stacklevel=1,
            )
        for ranged in self._ranged.values():
            yield from ranged.install(compiled)

    def hold(self, change: Removable) -> None:
        """Remove a change together with the annotation."""
        self._lasting.append(change)

    def remove(self) -> None:
        """Remove the annotation; a second call does nothing. The model can be annotated again."""
        super().remove()
        self._let_go()
        layers = {ranged.layer for ranged in self._ranged.values()}
        backend = session.backend
        if backend is not None:  # calls may be running on this thread
            for owner in reversed([owner for owner in backend.thread.position.owners if owner in layers]):
                backend.close(owner)
        for ranged in self._ranged.values():
            module = ranged.module()
            if module is not None and annotated.get(module) is ranged:
                del annotated[module]

    def owner_gone(self) -> None:
        """The model was garbage-collected."""
        super().owner_gone()
        self._let_go()

    def _let_go(self) -> None:
        """Remove what is installed for the lifetime of the annotation, even while no ranges are emitted."""
        lasting, self._lasting = self._lasting, []
        for change in lasting:
            change.remove()

    @property
    def inside_compiled(self) -> tuple[str, ...]:
        """Paths of modules inside a module compiled by torch.compile.

        They have ranges only at graph breaks; their kernels are attributed to the compiled module. A compiled function
        that calls the model is not detected here; see `never_entered`.
        """
        owner = self._owner()
        return () if owner is None else self._inside(Compiled(self._components or owner))

    def _inside(self, compiled: Compiled) -> tuple[str, ...]:
        return tuple(path for path, ranged in self._ranged.items() if ranged.module() in compiled.inside)

    def never_entered(self) -> list[str]:
        """Paths of modules not called while ranges were emitted: unused, compiled, or called without ``__call__``."""
        layers = {path: ranged.layer for path, ranged in self._ranged.items()}
        return [path for path, layer in layers.items() if not (layer.forward.backend or layer.recompute.backend)]


def range_model(
    model: Any,
    *,
    select: Select | None = None,
    depth: int | str | None = None,
    backward: bool = True,
    root: str | None = None,
    memory: bool | Read = False,
    compiled_parts: bool = False,
) -> ModelAnnotation:
    """Range the layers of a model, or of the modules of a pipeline; see `loop.annotate.annotate_model`."""
    if select is not None and depth is not None:
        raise UsageError("annotate_model takes select= or depth=, not both")
    require(root, (str, type(None)), "annotate_model: root", "a name")
    if memory:
        require(memory, (bool, Callable), "annotate_model: memory", "True, or a function that reads the memory")  # type: ignore[arg-type]
        session.add_memory_marks(read_cuda if memory is True else memory)
    components = None if isinstance(model, nn.Module) else _components(model)
    top = cast(nn.Module, model)
    tops = (
        [Submodule("", top)]
        if components is None
        else [Submodule(name, submodule) for name, submodule in components.items()]
    )
    if select is not None:
        submodules = _selected(components or top, select)
    elif depth is not None:
        levels = _levels(depth)
        submodules = [submodule for top in tops for submodule in (top, *descendants(top, levels))]
    else:
        submodules = [submodule for top in tops for submodule in by_structure(top)]
    root = root or (class_name(unwrapped(top)) if components is None else type(model).__name__)
    replace_in_notebook(model)
    return ModelAnnotation(
        model, submodules, backward=backward, root=root, compiled_parts=compiled_parts, components=components
    )


def _components(pipeline: Any) -> nn.ModuleDict:
    """The modules of a Diffusers-like pipeline by name."""
    components = getattr(pipeline, "components", None)
    named = components.items() if isinstance(components, Mapping) else ()
    modules = {name: component for name, component in named if isinstance(component, nn.Module)}
    if not modules:
        raise UsageError(
            f"annotate_model takes a torch.nn.Module, or a pipeline with modules in its components, not a "
            f"{type(pipeline).__name__}; annotate each module by itself"
        )
    return nn.ModuleDict(modules)


def _levels(depth: int | str) -> int:
    if depth == "leaf":
        return _LEAVES
    if isinstance(depth, int) and depth >= 0:
        return depth
    raise UsageError(f"depth={depth!r} is neither a number of levels nor 'leaf'")


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
