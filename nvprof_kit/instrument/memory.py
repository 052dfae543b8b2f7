"""`MemoryProfiler`: what holds the memory of a training step, by module: parameters, gradients, the optimizer's copies
and state, and what autograd keeps; reconciled with the allocator.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from . import state
from .annotate import annotate_model
from .memory_boundaries import Boundaries, Boundary, Counts, CudaAllocator
from .memory_files import MemoryFiles
from .memory_saved import SavedTensors
from .memory_tensors import KINDS, Held, Ledger, model_rows, optimizer_rows, value_rows
from .ranks import rank_folder
from .watch import Watch

ROUNDING, UNEXPLAINED = "rounding", "unexplained"
"""Kinds of what the allocator holds besides: blocks larger than asked for, and whatever nothing accounts for."""


@dataclass(frozen=True)
class MemoryOptions:
    """Where to write, and what.

    Attributes:
        folder: Holds a folder for each rank, ``rank0_dp0_tp0_pp0``.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the rank's folder; found by itself
            where the model's parameters have one.
        layouts: Write every module's bytes into ``memory.log`` at each time point, not only the sums.
        parquet: Write ``memory.parquet`` beside ``memory.csv``.
        pages: Write the sunburst pages and the line chart at the end.
    """

    folder: str | Path = "memory_trace"
    mesh: Any = None
    layouts: bool = True
    parquet: bool = False
    pages: bool = True


@dataclass(frozen=True)
class TimePoint:
    """The memory at one moment.

    Attributes:
        number: Counted from 0.
        name: ``step 0 forward``, or what `MemoryProfiler.point` was given.
        seconds: Since the profiler began.
        device: Where the model computes: rows on other devices are offloaded.
        rows: Every byte accounted for, `ROUNDING` and `UNEXPLAINED` among them where there is an allocator.
        allocator: Its counts, None without CUDA.
    """

    number: int
    name: str
    seconds: float
    device: str
    rows: tuple[Held, ...] = field(repr=False)
    allocator: Counts | None = None

    def sum_of(self, kind: str) -> int:
        """Bytes of a kind on the device."""
        return sum(row.bytes for row in self.rows if row.kind == kind and row.device == self.device)

    @property
    def offloaded(self) -> int:
        """Bytes of the five kinds on other devices."""
        return sum(row.bytes for row in self.rows if row.kind in KINDS and row.device != self.device)

    @property
    def total(self) -> int:
        """Bytes of the five kinds on the device."""
        return sum(self.sum_of(kind) for kind in KINDS)


class MemoryProfiler:
    """Account for the memory of some training steps; a context manager.

    ```python
    with MemoryProfiler(model, optimizer):
        for batch in batches:  # a few
            train(batch)
    ```

    A time point is taken when the model's forward ends, before and after each step of the optimizer, and where `point`
    is called. Nothing is kept alive and results stay what they are; each time point costs a walk over the parameters.
    Under ``NVPROF_KIT=off`` it does nothing.

    Args:
        model: The model; held weakly.
        optimizer: Its optimizer, or a wrapper of one; held weakly.
        options: Where to write, and what.

    Attributes:
        points: The time points so far.
        boundaries: The allocator at each layer's begin and end, with CUDA.
        folder: The rank's folder.

    Raises:
        UsageError: On entry: another one is running, or the folder cannot be made.
    """

    _running: MemoryProfiler | None = None

    def __init__(self, model: nn.Module, optimizer: Any = None, options: MemoryOptions = MemoryOptions()) -> None:
        self.options = options
        self.points: list[TimePoint] = []
        self.folder = Path(options.folder) / rank_folder(options.mesh or _mesh(model))
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._device = _device(model)
        self._undo: list[Callable[[], None]] = []
        self._boundaries = Boundaries(CudaAllocator(self._device)) if self._device.type == "cuda" else None
        self._saved: SavedTensors | None = None
        self._files: MemoryFiles | None = None
        self._began = 0.0
        self._step = 0

    @property
    def boundaries(self) -> list[Boundary]:
        """The allocator at each end of a layer's call; none without CUDA."""
        return [] if self._boundaries is None else self._boundaries.seen

    def __enter__(self) -> MemoryProfiler:
        """Begin; the first time point is what is there already."""
        model = self._model()
        if state.mode == "off" or model is None:
            return self
        if MemoryProfiler._running is not None:
            raise UsageError("a MemoryProfiler is running already; end that one first")
        self._files = MemoryFiles(self.folder, self.options)
        MemoryProfiler._running = self
        self._began = time.perf_counter()
        self._saved = SavedTensors(model)
        self._undo = [self._saved.remove, *self._follow_loop(model)]
        if self._boundaries is not None:
            self._undo += self._follow_layers(model, self._boundaries)
        self.point("begin")
        return self

    def __exit__(self, *_exception: object) -> None:
        """End, and write the pages; after an exception, of what was seen before it."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        files, self._files = self._files, None
        if files is not None:
            MemoryProfiler._running = None
            files.finish(self.points, self.boundaries)
        self._saved = None

    def point(self, name: str) -> None:
        """Take a time point now."""
        self._take(name, ())

    def _take(self, name: str, outputs: Any) -> None:
        if self._files is None:
            return
        ledger = Ledger()
        rows = list(self._rows(ledger, outputs))
        allocator = None if self._boundaries is None else self._boundaries.counts()
        if allocator is not None:
            here = str(self._device)
            explained = sum(row.bytes for row in rows if row.device == here)
            rows.append(Held(ROUNDING, "", allocator.allocated - allocator.requested, here))
            rows.append(Held(UNEXPLAINED, "", allocator.requested - explained, here))
        seconds = time.perf_counter() - self._began
        taken = TimePoint(len(self.points), name, seconds, str(self._device), tuple(rows), allocator)
        self.points.append(taken)
        self._files.write(taken)

    def _rows(self, ledger: Ledger, outputs: Any) -> Iterator[Held]:
        model, optimizer = self._model(), self._get_optimizer()
        if model is not None:
            yield from model_rows(model, ledger)
            if optimizer is not None:
                yield from optimizer_rows(model, optimizer, ledger)
        if self._saved is not None:
            yield from self._saved.rows(ledger)
        yield from value_rows("outputs", [outputs], ledger)

    def _get_optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def _follow_loop(self, model: nn.Module) -> list[Callable[[], None]]:
        handles = [model.register_forward_hook(self._forward_ended)]
        optimizer = self._get_optimizer()
        if optimizer is not None and hasattr(optimizer, "register_step_pre_hook"):
            handles.append(optimizer.register_step_pre_hook(self._backward_ended))
            handles.append(optimizer.register_step_post_hook(self._step_ended))
        return [handle.remove for handle in handles]

    def _follow_layers(self, model: nn.Module, boundaries: Boundaries) -> list[Callable[[], None]]:
        undo: list[Callable[[], None]] = []
        with suppress(UsageError):  # annotated already
            undo.append(annotate_model(model).remove)
        watch = Watch(boundaries)
        watch.attach()
        return [*undo, watch.detach]

    def _forward_ended(self, _model: nn.Module, _args: Any, outputs: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() == -1:
            self._take(f"step {self._step} forward", outputs)

    def _backward_ended(self, *_call: Any) -> None:
        self.point(f"step {self._step} backward")

    def _step_ended(self, *_call: Any) -> None:
        self.point(f"step {self._step} optimizer")
        self._step += 1
        if self._boundaries is not None:
            self._boundaries.step = self._step


def _device(model: nn.Module) -> torch.device:
    """Where the model computes: CUDA where any parameter is there, or where it is in use."""
    devices = {parameter.device for parameter in model.parameters()}
    on_gpu = sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index)
    if on_gpu:
        return on_gpu[0]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and devices == {torch.device("cpu")}:
        return (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.memory_allocated() else torch.device("cpu")
        )
    return torch.device("cpu")


def _mesh(model: nn.Module) -> Any:
    """The mesh that some parameter is spread over."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in meshes if mesh is not None), None)
