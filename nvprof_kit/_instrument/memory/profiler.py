"""`MemoryProfiler`: memory of a training step by module: parameters, gradients, optimizer state, and tensors saved for
backward; reconciled with the CUDA caching allocator.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import annotate_model
from nvprof_kit._instrument.loop.loop import hook_steps, innermost
from nvprof_kit._instrument.memory.allocator import (
    UNEXPLAINED,
    Boundaries,
    Boundary,
    History,
    cast_weights,
    cuda_blocks,
    cuda_counts,
    unknown_rows,
    workspace_bytes,
)
from nvprof_kit._instrument.memory.files import MemoryFiles
from nvprof_kit._instrument.memory.saved import SavedTensors
from nvprof_kit._instrument.memory.tensors import (
    ROUNDING,
    Held,
    Ledger,
    TimePoint,
    model_rows,
    optimizer_rows,
    value_rows,
)
from nvprof_kit._instrument.modules.calls import put_around
from nvprof_kit._instrument.patches import uncompiled, uncompiled_itself
from nvprof_kit._instrument.ranks import mesh_of, rank_folder
from nvprof_kit._instrument.session import Watch
from nvprof_kit.errors import PATH, UsageError, require
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
        layouts: Write the bytes of each module to ``memory.log`` at each time point, not only the sums.
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
        layouts: bool = True,
        pages: bool = True,
    ) -> None:
        require(model, nn.Module, "MemoryProfiler: model", "a torch.nn.Module")
        self.points: list[TimePoint] = []
        self.folder = Path(require(folder, PATH, "MemoryProfiler: folder", "a path")) / rank_folder(
            mesh or mesh_of(model)
        )
        self._layouts, self._pages = layouts, pages
        self._model = weakref.ref(model)
        self._optimizers = (
            [] if optimizer is None else [weakref.ref(inner_optimizer) for inner_optimizer in innermost(optimizer)]
        )
        self._device = _device(model)
        self._undo: list[Callable[[], None]] = []
        on_cuda = self._device.type == "cuda"
        lists = on_cuda and torch.cuda.get_allocator_backend() == "native"  # cudaMallocAsync lists neither
        self._history = History(self._device.index) if lists else None
        self._boundaries = Boundaries(partial(cuda_counts, self._device.index), self._history) if on_cuda else None
        self._saved: SavedTensors | None = None
        self._files: MemoryFiles | None = None
        self._began = 0.0
        self._process = 0
        self._step = 0
        self._seen_forward = False

    @property
    def boundaries(self) -> list[Boundary]:
        """Allocator counters at the begin and end of each layer call; empty without CUDA."""
        return [] if self._boundaries is None else self._boundaries.seen

    def __enter__(self) -> MemoryProfiler:
        """Start; the first time point shows the memory that is already allocated."""
        model = self._model()
        if session.mode == "off" or model is None:
            return self
        if MemoryProfiler._running is not None and MemoryProfiler._running._process == os.getpid():
            raise UsageError("a MemoryProfiler is already running; end it first")
        self._process = os.getpid()
        self._files = MemoryFiles(self.folder, layouts=self._layouts, pages=self._pages)
        self.folder = self._files.folder
        MemoryProfiler._running = self
        self._began = time.perf_counter()
        self._undo = []
        try:
            self._saved = SavedTensors(model)
            self._undo.append(self._saved.remove)
            self._undo += [put_around(called, self._forward).remove for called in _called(model)]
            before = lambda *_call: self.point(f"step {self._step} backward")  # noqa: E731
            self._undo += [hook.remove for hook in hook_steps(self._known_optimizers(), before, self._step_ended)]
            if self._boundaries is not None:
                with suppress(UsageError):  # a part of the model is already annotated
                    if model not in session.annotated:
                        self._undo.append(annotate_model(model, steps=False).remove)
                watch = Watch(self._boundaries)
                watch.attach()
                self._undo.append(watch.detach)
            if self._history is not None:
                self._history.start()
                self._undo.append(self._history.stop)
            self.point("begin")
        except BaseException:
            self._take_back()
            files, self._files, MemoryProfiler._running = self._files, None, None
            if files is not None:
                files.abandon()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop and write the pages, also after an exception. A forked child leaves this to its parent."""
        if self._files is not None and self._process != os.getpid():
            self._files = self._saved = None
            return
        if self._boundaries is not None:
            with suppress(RuntimeError):  # CUDA is no longer available
                self._boundaries.settle()
        self._take_back()
        if self._files is not None and self._saved is not None:
            if self._step and not self._seen_forward:
                warnings.warn(
                    "MemoryProfiler saw no forward of the model it was given, so activations are missing: profile what "
                    "the program calls (the result of torch.compile or of a wrapper), not what is inside",
                    stacklevel=2,
                )
            if self._saved.hidden:
                hidden = ", ".join(sorted(self._saved.hidden)[:3])
                warnings.warn(
                    f"MemoryProfiler could not see what autograd keeps in {hidden}: its forward ran under other hooks "
                    "(save_on_cpu) or on another thread; activations there are missing",
                    stacklevel=2,
                )
        files, self._files = self._files, None
        if files is not None:
            MemoryProfiler._running = None
            try:
                files.finish(self.points, self.boundaries)
            except OSError as error:
                self._cannot_write(error)
        self._saved = None

    def _take_back(self) -> None:
        """Undo whatever `__enter__` did."""
        undo, self._undo = self._undo, []
        for change in reversed(undo):
            with suppress(Exception):  # one failure must not prevent the others from being undone
                change()

    def point(self, name: str) -> None:
        """Take a time point now.

        Args:
            name: Name of the time point.
        """
        self._take(encodable(name))

    @uncompiled
    def _take(self, name: str, outputs: Any = (), inputs: Any = ()) -> None:
        if self._files is None or self._process != os.getpid():
            return
        ledger = Ledger()
        rows = list(self._rows(ledger))
        rows += [*value_rows("outputs", [outputs], ledger), *value_rows("inputs", [inputs], ledger)]
        allocator = None if self._boundaries is None else self._boundaries.counts()
        if allocator is not None:
            here = str(self._device)
            explained = sum(row.bytes for row in rows if row.device == here)
            rows.append(Held(ROUNDING, "", allocator.allocated - allocator.requested, here))
            unexplained = allocator.requested - explained
            model = self._model()
            if self._history is None or model is None:
                rows.append(Held(UNEXPLAINED, "", unexplained, here))
            else:  # the allocator lists its blocks, so bytes without a known owner are split by likely kind
                number = self._device.index
                workspace = workspace_bytes(torch.cuda.get_device_capability(number))
                casts = cast_weights(model, self._device)
                blocks, addresses = cuda_blocks(number), ledger.addresses
                rows += unknown_rows(
                    self._device, blocks, addresses, workspace=workspace, casts=casts, unexplained=unexplained
                )
        seconds = time.perf_counter() - self._began
        taken = TimePoint(len(self.points), name, seconds, str(self._device), tuple(rows), allocator)
        self.points.append(taken)
        try:
            self._files.write(taken)
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        """Warn and stop recording: a full disk must not end the training."""
        warnings.warn(f"{self.folder}: cannot write there ({error.strerror}); the memory profile ends", stacklevel=3)
        if self._files is not None:
            self._files.abandon()
            self._files = MemoryProfiler._running = None

    def _rows(self, ledger: Ledger) -> Iterator[Held]:
        model = self._model()
        if model is not None:
            yield from model_rows(model, ledger)
            for optimizer in self._known_optimizers():
                yield from optimizer_rows(model, optimizer, ledger)
        if self._saved is not None:
            yield from self._saved.rows(ledger)

    def _known_optimizers(self) -> list[Any]:
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]

    @uncompiled_itself
    def _forward(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            self._seen_forward = True
            self._take(f"step {self._step} forward", outputs, [*args, kwargs])
        return outputs

    def _step_ended(self, optimizer: Any) -> None:
        self.point(f"step {self._step} optimizer")
        if optimizer is not self._known_optimizers()[-1]:
            return
        self._step += 1
        if self._boundaries is not None:
            self._boundaries.step = self._step


def _called(model: nn.Module) -> list[nn.Module]:
    """The modules that the program calls: the model, or the members of a container without a forward."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [called for child in model.children() for called in _called(child)]
    return [model]


def _device(model: nn.Module) -> torch.device:
    """The device on which the model computes: CUDA if any parameter is on CUDA or if CUDA is in use."""
    devices = {parameter.device for parameter in model.parameters()}
    on_gpu = sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index)
    if on_gpu:
        return on_gpu[0]
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_allocated()
    if in_use and devices == {torch.device("cpu")}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
