"""`MemoryProfiler`: memory of a training step by module: parameters, gradients, optimizer state, and tensors saved for
backward; reconciled with the CUDA caching allocator.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import annotate_model
from nvprof_kit._instrument.loop.loop import hook_steps, innermost
from nvprof_kit._instrument.memory import allocator, files, tensors
from nvprof_kit._instrument.modules.blocks import Submodule, children, is_list
from nvprof_kit._instrument.patches import uncompiled, uncompiled_itself
from nvprof_kit._instrument.ranges.ranges import put_around
from nvprof_kit._instrument.ranks import mesh_of, rank_folder
from nvprof_kit._instrument.session import Watch
from nvprof_kit.errors import PATH, UsageError, require
from nvprof_kit.issues import Issue
from nvprof_kit.names import encodable


class MemoryProfiler:
    """Account for the memory of some training steps by module; a context manager.

    ```python
    with MemoryProfiler(model, optimizer):
        for batch in batches:  # a few
            train(batch)
    ```

    It records parameters, gradients, the optimizer's copies and state, and the tensors that autograd saves for
    backward, in bytes. A time point is taken when the model's forward ends, before and after each optimizer step, and
    when `point` is called. No tensor is kept alive and results do not change; each time point walks over the
    parameters. With ``NVPROF_KIT=off`` it does nothing. A warning says if activations are missing: the model's forward
    never ran, or other saved-tensor hooks (such as ``save_on_cpu``) or another thread hid them.

    Args:
        model: The model; held weakly.
        optimizer: The optimizer, a wrapper around one or several, or a list; held weakly. A step ends when the last
            optimizer has stepped.
        folder: Output folder; each rank writes to its own subfolder, ``rank0_dp0_tp0_pp0``.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the subfolder. By default that of the
            model's parameters, if they have one.
        pages: Write the sunburst pages and the line chart at the end.

    Attributes:
        points: The time points so far.
        boundaries: Allocator counters at the begin and end of each layer call, with CUDA.
        folder: The rank's folder.

    Raises:
        UsageError: An argument is of the wrong kind; on entry: another profiler is running, or the folder cannot be
            created.
    """

    _running: MemoryProfiler | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        folder: str | Path = "memory_trace",
        *,
        mesh: Any = None,
        pages: bool = True,
    ) -> None:
        require(model, nn.Module, "MemoryProfiler: model", "a torch.nn.Module")
        parent = Path(require(folder, PATH, "MemoryProfiler: folder", "a path"))
        self.points: list[files.TimePoint] = []
        self.folder = parent / rank_folder(mesh or mesh_of(model))
        self._pages = pages
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(inner) for inner in ([] if optimizer is None else innermost(optimizer))]
        self._device = device = _device(model)
        on_cuda = device.type == "cuda"
        has_history = on_cuda and torch.cuda.get_allocator_backend() == "native"  # cudaMallocAsync has none
        self._history = allocator.History(device.index) if has_history else None
        self._boundaries = (
            allocator.Boundaries(partial(allocator.cuda_counts, device.index), self._history) if on_cuda else None
        )
        self._changes = ExitStack()
        self._saved: tensors.SavedTensors | None = None
        self._writes = False
        self._began = 0.0
        self._process = 0
        self._step = 0
        self._has_seen_forward = False

    @property
    def boundaries(self) -> list[allocator.Boundary]:
        """Allocator counters at the begin and end of each layer call; empty without CUDA."""
        return [] if self._boundaries is None else self._boundaries.seen

    def __enter__(self) -> MemoryProfiler:
        """Start; the first time point shows the memory that is already allocated."""
        model = self._model()
        if session.mode == "off" or model is None:
            return self
        if MemoryProfiler._running is not None and MemoryProfiler._running._process == os.getpid():
            raise UsageError("a MemoryProfiler is already running; end it first")
        self.folder = files.start_files(self.folder)
        self._writes = True
        self._process = os.getpid()
        MemoryProfiler._running = self
        self._began = time.perf_counter()
        try:
            self._install(model)
            self.point("begin")
        except BaseException:
            self._take_back()
            raise
        return self

    def _install(self, model: nn.Module) -> None:
        later = self._changes.callback
        self._saved = tensors.SavedTensors(model)
        later(self._saved.remove)
        forward_modules = [child.module for child in children(Submodule("", model))] if is_list(model) else [model]
        for module in forward_modules:
            later(put_around(module, self._forward).remove)
        before = lambda _optimizer: self.point(f"step {self._step} backward")  # noqa: E731
        for hook in hook_steps(self._live_optimizers(), before, self._step_ended):
            later(hook.remove)
        if self._boundaries is not None:
            with suppress(UsageError):  # a part of the model is already annotated
                if model not in session.annotated:
                    later(annotate_model(model, steps=False).remove)
            watch = Watch(self._boundaries)
            watch.attach()
            later(watch.detach)
        if self._history is not None:
            self._history.start()
            later(self._history.stop)

    def __exit__(self, *_exception: object) -> None:
        """Stop and write the pages, also after an exception. A forked child leaves this to its parent."""
        if self._process != os.getpid():
            return
        if self._boundaries is not None:
            with suppress(RuntimeError):  # CUDA is no longer available
                self._boundaries.settle()
        writes, saved = self._writes, self._saved
        self._take_back()
        if not writes or saved is None:
            return
        if self._step and not self._has_seen_forward:
            warnings.warn(Issue.of("no-forward"), stacklevel=2)
        if saved.hidden:
            warnings.warn(Issue.of("hidden-activations", layers=", ".join(sorted(saved.hidden)[:3])), stacklevel=2)
        try:
            if self.boundaries:
                files.write_calls(self.folder, self.boundaries)
            if self._pages:
                files.write_pages(self.folder, self.points, self.boundaries)
        except OSError as error:
            self._warn(error)

    def _take_back(self) -> None:
        """Undo what `__enter__` did."""
        self._saved = MemoryProfiler._running = None
        self._writes = False
        with suppress(Exception):
            self._changes.close()

    def _warn(self, error: OSError) -> None:
        warnings.warn(f"{self.folder}: cannot write there ({error.strerror}); the memory profile ends", stacklevel=4)

    def point(self, name: str) -> None:
        """Take a time point now.

        Args:
            name: Name of the time point.
        """
        self._take(encodable(name))

    @uncompiled
    def _take(self, name: str, outputs: Any = (), inputs: Any = ()) -> None:
        model = self._model()
        if not self._writes or self._saved is None or model is None or self._process != os.getpid():
            return
        ledger = tensors.Ledger()
        rows = [*tensors.model_rows(model, ledger)]
        for optimizer in self._live_optimizers():
            rows += tensors.optimizer_rows(model, optimizer, ledger)
        rows += self._saved.rows(ledger)
        rows += [*tensors.value_rows("outputs", [outputs], ledger), *tensors.value_rows("inputs", [inputs], ledger)]
        counts = None if self._boundaries is None else self._boundaries.counts()
        if counts is not None:
            blocks = None if self._history is None else allocator.cuda_blocks(self._device.index)
            rows += allocator.unknown_rows(rows, ledger, model=model, device=self._device, counts=counts, blocks=blocks)
        seconds = time.perf_counter() - self._began
        point = files.TimePoint(len(self.points), name, seconds, str(self._device), tuple(rows), counts)
        self.points.append(point)
        try:
            files.write_point(self.folder, point)
        except OSError as error:  # a full disk must not end the training
            self._warn(error)
            self._writes = False

    def _live_optimizers(self) -> list[Any]:
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]

    @uncompiled_itself
    def _forward(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            self._has_seen_forward = True
            self._take(f"step {self._step} forward", outputs, [*args, kwargs])
        return outputs

    def _step_ended(self, optimizer: Any) -> None:
        self.point(f"step {self._step} optimizer")
        if optimizer is self._live_optimizers()[-1]:
            self._step += 1
            if self._boundaries is not None:
                self._boundaries.step = self._step


def _device(model: nn.Module) -> torch.device:
    """The device on which the model computes: CUDA if any parameter is on CUDA or if CUDA is in use."""
    devices = {parameter.device for parameter in model.parameters()}
    on_gpu = sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index)
    if on_gpu:
        return on_gpu[0]
    is_cuda_used = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0
    if is_cuda_used and devices == {torch.device("cpu")}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
