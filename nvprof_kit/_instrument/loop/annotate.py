"""`annotate_model`: range the layers of a model, and the loop around it, with one call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.inferred import drop_model, infer_steps
from nvprof_kit._instrument.loop.loop import annotate_dataloader, annotate_optimizer
from nvprof_kit._instrument.modules.annotate import ModelAnnotation, Pipeline, Select, range_model
from nvprof_kit._instrument.modules.calls import instrument_method
from nvprof_kit._instrument.patches import Handle
from nvprof_kit._instrument.session import Read
from nvprof_kit.errors import UsageError, require


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
    """Range the layers of a model: forward, backward, and recompute under activation checkpointing.

    By default, the repeated blocks of the model are detected. Ranged are the blocks, their direct children, and all
    modules outside the blocks: embeddings, final norm, head, their containers, and the model itself. In a model without
    repeated blocks, the direct children are ranged. Hooks are installed only while ranges are emitted, that is, while
    nsys, ncu or the embedded recorder is attached. Outputs, gradients and memory do not change.

    Args:
        model: The model; held weakly. Or a Diffusers pipeline; the paths of its modules then begin with the component's
            name (``unet.down_blocks.0``).
        select: Range only these modules: a class or a tuple of classes; one or several glob patterns (``layers.*.mlp``,
            matched against whole paths as by `fnmatch`); or a predicate ``(path, module) -> bool``.
        depth: Range the model and this many levels below it, not counting ``ModuleList``; ``"leaf"`` for all levels.
        backward: Range the backward pass.
        root: Name of the model itself, which has no path; by default its class name.
        compiled_parts: Also range modules inside code that torch.compile compiles while the annotation exists. The
            generated code then emits ranges around its kernel launches, and is cached separately.
        memory: Emit marks with the bytes allocated by PyTorch's CUDA allocator at the begin and end of each layer, to
            an attached tool; or with what a given function reads. The setting applies to the whole process,
            permanently.
        optimizer: Also range each step of this optimizer, or of several, as `nvprof_kit.annotate_optimizer` does.
        dataloader: Also range the fetches of this loader: iterate ``handle.dataloader`` in its place, which is
            `nvprof_kit.annotate_dataloader` of it.
        methods: Names of methods to range as `nvprof_kit.instrument_method` does, of the model (``"generate"``) or of
            a module in it (``"vae.encode"``).
        steps: Infer the steps of the loop: a training step ends when the optimizer has stepped and the model is called
            again; without training, each call of the model is a step. The inference ends with the program's first own
            `nvprof_kit.step`, and where an integration ranges the loop.

    Returns:
        A handle with ``remove()``. As a context manager, it removes the annotation at the end.

    Raises:
        UsageError: ``model`` is neither a module nor a pipeline, it or one of its modules is already annotated, nothing
            matches ``select``, or the options contradict each other. In a notebook, the annotation of the same model is
            replaced instead, so that a cell can be rerun.
    """
    require(methods, Iterable, "annotate_model: methods", "a name or several")
    require(dataloader, (Iterable, type(None)), "annotate_model: dataloader", "an iterable of batches")
    handle = range_model(
        model,
        select=select,
        depth=depth,
        backward=backward,
        root=root,
        memory=memory,
        compiled_parts=compiled_parts,
    )
    try:
        names = [methods] if isinstance(methods, str) else list(methods)
        for path, _, name in (method.rpartition(".") for method in names):
            handle.hold(instrument_method(_module_at(model, path), name))
        if optimizer is not None:
            handle.hold(annotate_optimizer(optimizer))
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


def _module_at(model: Any, path: str) -> Any:
    parts = [*model.components] if not isinstance(model, nn.Module) else []
    first, _, below = path.partition(".")
    if first in parts:
        model, path = model.components[first], below
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UsageError(
            f"methods={path!r}: {type(model).__name__} has no module {path}; see named_modules()"
        ) from None
