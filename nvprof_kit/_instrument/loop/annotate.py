"""`annotate_model`: annotate the layers of a model, and the loop around it, with one call."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.compile import Family, kernels
from nvprof_kit._instrument.loop.inferred import drop_model, infer_steps
from nvprof_kit._instrument.loop.loop import annotate_dataloader, annotate_optimizer
from nvprof_kit._instrument.modules.blocks import Select, Submodule, class_name, select_modules, unwrapped
from nvprof_kit._instrument.modules.calls import Compiled, followers, instrument_method, ranged, wrappers
from nvprof_kit._instrument.patches import Handle, Removable, Untraced
from nvprof_kit._instrument.ranges.backward import recomputes
from nvprof_kit._instrument.ranges.ranges import Layer, call_inside, put_around
from nvprof_kit._instrument.ranks import mark_rank
from nvprof_kit._instrument.session import Annotation, Read, read_cuda, replace_in_notebook
from nvprof_kit.errors import UsageError, require
from nvprof_kit.issues import Issue
from nvprof_kit.names import layer_index, strip_wrappers


class Pipeline(Protocol):
    """An object with modules as components, such as a Diffusers pipeline."""

    @property
    def components(self) -> Mapping[str, Any]:
        """Its components by name; those that are modules are annotated."""


class ModelAnnotation(Annotation):
    """The handle of an annotated model.

    Attributes:
        paths: Paths of the annotated modules in model order; the root's is its class name.
        layers: Their layers, in the same order.
        aliases: Further paths of modules that occur more than once, with the path used for their ranges.
        skipped: Paths of modules that cannot be annotated, with the reason.
        dataloader: The annotated data loader, if `annotate_model` got one.
    """

    def __init__(
        self,
        model: Any,
        submodules: list[Submodule],
        *,
        root: str,
        backward: bool = True,
        compiled_parts: bool = False,
        components: nn.Module | None = None,
    ) -> None:
        self._components = components
        self.dataloader: Any = None
        self.aliases: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._layer_of: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._warned = False
        self._cleanup = ExitStack()
        names: set[str] = set()
        for path, module in submodules:
            name = strip_wrappers(path) or root
            if isinstance(module, torch.jit.ScriptModule):
                self.skipped[name] = "TorchScript modules take no hooks"
            elif module in self._layer_of:
                self.aliases[name] = self._layer_of[module].path
            elif name not in names:  # a wrapper and its inner module share one name; range the wrapper
                if module in ranged and model not in session.annotated:  # else the base class raises
                    raise UsageError.of("ranged-module", name=name, path=ranged[module].path)
                names.add(name)
                self._layer_of[module] = Layer(name, backward=backward)
        self.layers = list(self._layer_of.values())
        self.paths = tuple(layer.path for layer in self.layers)
        self._has_compiled_parts = compiled_parts and session.mode != "off" and self._annotate_compiled_parts(root)
        try:
            super().__init__(model)
        except BaseException:
            self._cleanup.close()
            raise
        ranged.update(self._layer_of)

    def _annotate_compiled_parts(self, root: str) -> bool:
        """Emit ranges for modules inside what is compiled from now on; False if this PyTorch's compiler cannot."""
        try:
            self.hold(kernels.hold(self))
        except (ImportError, AttributeError) as error:
            warnings.warn(Issue.of("no-kernel-ranges", error=error), stacklevel=4)
            return False
        family = Family(dict(zip(self.paths, self.layers, strict=True)), root)
        for layer in self.layers:
            layer.family = family
        return True

    def _install(self, _owner: Any) -> Iterator[Removable]:
        mark_rank()
        yield wrappers.hold(self)
        yield recomputes.hold(self)
        yield followers.hold(self)
        yield Untraced(self._hook_calls)

    def _hook_calls(self) -> Iterator[Removable]:
        """Put a range around the calls of each module; a warning says once if compiled code hides several layers."""
        owner = self._owner()
        if owner is None:
            return
        compiled = Compiled(self._components or owner)
        hidden_layers = {layer_index(path) for path in self._paths_inside(compiled)} - {-1}
        regions = [layer.path for module, layer in self._layer_of.items() if module in compiled.regions]
        layers_have_regions = any(layer_index(path) != -1 for path in regions)
        if len(hidden_layers) > 1 and not (self._has_compiled_parts or self._warned or layers_have_regions):
            self._warned = True
            owners = ", ".join(sorted(regions)) or "the compiled module"
            warnings.warn(Issue.of("compiled-layers", count=len(hidden_layers), owners=owners), stacklevel=1)
        for module, layer in list(self._layer_of.items()):
            for called_module in compiled.called(module):
                yield put_around(called_module, partial(call_inside, layer))

    def hold(self, change: Removable) -> None:
        """Remove a change together with the annotation, and not while no ranges are emitted."""
        self._cleanup.callback(change.remove)

    def remove(self) -> None:
        """Remove the annotation; a second call does nothing. The model can be annotated again."""
        super().remove()
        self._cleanup.close()
        backend = session.backend
        if backend is not None:  # calls may be running on this thread
            for owner in reversed([owner for owner in backend.thread.position.owners if owner in self.layers]):
                backend.close(owner)
        for module, layer in self._layer_of.items():
            if ranged.get(module) is layer:
                del ranged[module]

    def owner_gone(self) -> None:
        """The model was garbage-collected."""
        super().owner_gone()
        self._cleanup.close()

    @property
    def inside_compiled(self) -> tuple[str, ...]:
        """Paths of modules inside a module compiled by torch.compile.

        They have ranges only at graph breaks; their kernels are attributed to the compiled module. A compiled function
        that calls the model is not detected here; see `never_entered`.
        """
        owner = self._owner()
        return () if owner is None else self._paths_inside(Compiled(self._components or owner))

    def _paths_inside(self, compiled: Compiled) -> tuple[str, ...]:
        return tuple(layer.path for module, layer in self._layer_of.items() if module in compiled.inside)

    def never_entered(self) -> list[str]:
        """Paths of modules not called while ranges were emitted: unused, compiled, or called without ``__call__``."""
        return [layer.path for layer in self.layers if not (layer.range.backend or layer.recompute.backend)]


def annotate_model(
    model: nn.Module | Pipeline,
    *,
    select: Select | None = None,
    depth: int | str | None = None,
    backward: bool = True,
    root: str | None = None,
    memory: bool | Read = False,
    compiled_parts: bool = False,
    optimizer: Any = None,
    dataloader: Iterable[Any] | None = None,
    methods: str | Iterable[str] = (),
    steps: bool = True,
) -> ModelAnnotation:
    """Annotate the layers of a model with ranges: forward, backward, and recompute under activation checkpointing.

    By default, the repeated blocks of the model are detected. Annotated are the blocks, their direct children, and all
    modules outside the blocks: embeddings, final norm, head, their containers, and the model itself. In a model without
    repeated blocks, the direct children are annotated. Hooks are installed only while ranges are emitted, that is,
    while nsys, ncu or the embedded recorder is attached. Outputs, gradients and memory do not change.

    Args:
        model: The model; held weakly. Or a Diffusers pipeline; the paths of its modules then begin with the component's
            name (``unet.down_blocks.0``).
        select: Annotate only these modules: a class or a tuple of classes; one or several glob patterns
            (``layers.*.mlp``, matched against whole paths as by `fnmatch`); or a predicate ``(path, module) -> bool``.
        depth: Annotate the model and this many levels below it, not counting ``ModuleList``; ``"leaf"`` for all levels.
        backward: Annotate the backward pass too.
        root: Name of the model itself, which has no path; by default its class name.
        compiled_parts: Also annotate modules inside code that torch.compile compiles while the annotation exists. The
            generated code then emits ranges around its kernel launches, and is cached separately.
        memory: Emit marks with the bytes allocated by PyTorch's CUDA allocator at the begin and end of each layer, to
            an attached tool; or with what a given function reads. The setting applies to the whole process,
            permanently.
        optimizer: Also annotate each step of this optimizer, or of several, as `nvprof_kit.annotate_optimizer` does.
        dataloader: Also annotate the fetches of this loader: iterate ``handle.dataloader`` in its place, which is
            `nvprof_kit.annotate_dataloader` of it.
        methods: Names of methods to annotate as `nvprof_kit.instrument_method` does, of the model (``"generate"``) or
            of a module in it (``"vae.encode"``).
        steps: Infer the steps of the loop: a training step ends when the optimizer has stepped and the model is called
            again; without training, each call of the model is a step. The inference ends with the program's first own
            `nvprof_kit.step`, and where an integration annotates the loop.

    Returns:
        A handle with ``remove()``. As a context manager, it removes the annotation at the end.

    Raises:
        UsageError: ``model`` is neither a module nor a pipeline, it or one of its modules is already annotated, nothing
            matches ``select``, or the options contradict each other. In a notebook, the annotation of the same model is
            replaced instead, so that a cell can be rerun.
    """
    require(methods, Iterable, "annotate_model: methods", "a name or several")
    require(dataloader, (Iterable, type(None)), "annotate_model: dataloader", "an iterable of batches")
    require(root, (str, type(None)), "annotate_model: root", "a name")
    if memory:
        require(memory, (bool, Callable), "annotate_model: memory", "True, or a function that reads the memory")  # type: ignore[arg-type]
        session.add_memory_marks(read_cuda if memory is True else memory)
    components = None if isinstance(model, nn.Module) else _components(model)
    top = components or cast(nn.Module, model)
    submodules = select_modules(top, select, depth)
    replace_in_notebook(model)
    root = root or (type(model).__name__ if components else class_name(unwrapped(top)))
    handle = ModelAnnotation(
        model, submodules, root=root, backward=backward, compiled_parts=compiled_parts, components=components
    )
    try:
        for method in [methods] if isinstance(methods, str) else methods:
            path, _, name = method.rpartition(".")
            try:
                module = top.get_submodule(path)
            except AttributeError:
                raise UsageError.of("no-module", method=method, model=type(model).__name__, path=path) from None
            handle.hold(instrument_method(module, name))
        several = optimizer if type(optimizer) in (list, tuple) else (optimizer,) * (optimizer is not None)
        for one in several:
            handle.hold(annotate_optimizer(one))
        if dataloader is not None:
            handle.dataloader = annotate_dataloader(dataloader)
    except BaseException:
        handle.remove()
        raise
    if steps and isinstance(model, nn.Module) and session.mode != "off":
        infer_steps(model)
        reference = weakref.ref(model)
        handle.hold(Handle(lambda: drop_model(reference())))
    return handle


def _components(pipeline: Any) -> nn.ModuleDict:
    """The modules of a Diffusers-like pipeline by name."""
    components = getattr(pipeline, "components", None)
    named = components.items() if isinstance(components, Mapping) else ()
    modules = {name: component for name, component in named if isinstance(component, nn.Module)}
    if not modules:
        raise UsageError.of("not-a-model", kind=type(pipeline).__name__)
    return nn.ModuleDict(modules)
