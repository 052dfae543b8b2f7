"""Memory of a model and its optimizer at one time: parameters, gradients, master copies, optimizer state.

Bytes are storage bytes, each counted once: tied weights and views add nothing. A ``DTensor`` counts as its local shard,
a wrapper tensor (quantized, nested) as its inner tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from nvprof_kit._instrument.loop.loop import innermost
from nvprof_kit.names import strip_wrappers

PARAMS, GRADS, OS_PARAMS, OS_STATE, ACTIVATION = "params", "grads", "os_params", "os_state", "activation"
KINDS = (PARAMS, GRADS, OS_PARAMS, OS_STATE, ACTIVATION)
"""Parameters, gradients, the optimizer's copies of parameters, its state, and tensors saved by autograd."""

ROUNDING = "rounding"
"""Kind of the bytes that allocator blocks have beyond the requested size."""

NONE = "(none)"
_MASTER = ("master", "fp32")
"""Parts of the keys under which optimizers store a master copy in a parameter's state."""


@dataclass(frozen=True)
class Counts:
    """Counters of the CUDA caching allocator, in bytes.

    Attributes:
        allocated: Size of the blocks in use.
        requested: Requested bytes in these blocks.
        reserved: Memory reserved from CUDA.
        peak: Maximum of `allocated` since the last reading.
    """

    allocated: int
    requested: int
    reserved: int
    peak: int


class Held(NamedTuple):
    """Some bytes: their kind, the path of the owner, and their device."""

    kind: str
    path: str
    bytes: int
    device: str


@dataclass(frozen=True)
class TimePoint:
    """The memory at one moment.

    Attributes:
        number: Counted from 0.
        name: ``step 0 forward``, or the name passed to `MemoryProfiler.point`.
        seconds: Time since the profiler started.
        device: The device on which the model computes; rows on other devices are offloaded.
        rows: The bytes by kind and module; with CUDA also `ROUNDING`, and `UNEXPLAINED` last.
        allocator: Counters of the CUDA caching allocator; None without CUDA.
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


class Ledger:
    """Counts tensors, each byte of a storage once.

    Attributes:
        addresses: Addresses of all counted storages.
    """

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self._covered: dict[int, list[tuple[int, int]]] = {}

    def add(self, tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
        """Device and bytes not counted before, for each plain tensor in the tensor."""
        for inner in parts(tensor):
            storage = inner.untyped_storage()
            self.addresses.add(storage.data_ptr())
            start, end = extent(inner)
            taken = self._covered.setdefault(storage._cdata, [])
            new = end - start - sum(max(min(end, e) - max(start, b), 0) for b, e in taken)
            if new > 0:
                self._cover(taken, start, end)
                yield new, str(inner.device)

    def add_storage(self, key: int, size: int, address: int) -> bool:
        """Count a whole storage by its key; returns False if part of it was counted before."""
        self.addresses.add(address)
        new = key not in self._covered
        if new:
            self._covered[key] = [(0, size)]
        return new

    @staticmethod
    def _cover(taken: list[tuple[int, int]], start: int, end: int) -> None:
        uncovered = [span for span in taken if span[1] < start or span[0] > end]
        touching = [span for span in taken if not (span[1] < start or span[0] > end)]
        lowest = min([start, *(b for b, _ in touching)])
        taken[:] = [*uncovered, (lowest, max([end, *(e for _, e in touching)]))]


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors in a tensor on this rank, except those without memory."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        yield from parts(local)
    elif type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())


_PLAIN = (torch.Tensor, nn.Parameter)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Begin and end (exclusive) of a tensor in its storage, in bytes."""
    if tensor.numel() == 0:
        return 0, 0
    spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return start, min(start + (spread + 1) * tensor.itemsize, tensor.untyped_storage().nbytes())


def model_rows(model: nn.Module, ledger: Ledger) -> Iterator[Held]:
    """A row for each parameter, buffer and gradient."""
    named = [(strip_wrappers(path), parameter) for path, parameter in model.named_parameters()]
    for path, parameter in named:
        yield from _rows(PARAMS, path, parameter, ledger)
    for path, buffer in model.named_buffers():
        yield from _rows("buffers", strip_wrappers(path), buffer, ledger)
    for path, parameter in named:
        if parameter.grad is not None:
            yield from _rows(GRADS, path, parameter.grad, ledger)


def optimizer_rows(model: nn.Module, optimizer: Any, ledger: Ledger) -> Iterator[Held]:
    """A row for each master copy, its gradient, and each state tensor of an optimizer or of its inner optimizers."""
    for inner in innermost(optimizer):
        optimizer_parameters = [
            parameter for group in getattr(inner, "param_groups", ()) for parameter in group["params"]
        ]
        paths = _paths(model, optimizer_parameters)
        for parameter in optimizer_parameters:
            yield from _rows(OS_PARAMS, paths[id(parameter)], parameter, ledger)
            if parameter.grad is not None:
                yield from _rows(GRADS, paths[id(parameter)], parameter.grad, ledger)
        for parameter, state in getattr(inner, "state", {}).items():
            path = paths.get(id(parameter), NONE)
            for name, tensor in _tensors(state):
                kind = OS_PARAMS if any(word in name for word in _MASTER) else OS_STATE
                yield from _rows(kind, f"{path}.{name}" if name else path, tensor, ledger)


def _rows(kind: str, path: str, tensor: torch.Tensor, ledger: Ledger) -> Iterator[Held]:
    for count, device in ledger.add(tensor):
        yield Held(kind, path, count, device)


def _paths(model: nn.Module, parameters: list[Any]) -> dict[int, str]:
    """Path of each parameter of an optimizer: the model's parameters, or master copies of them in the same order."""
    named = [(strip_wrappers(path), parameter) for path, parameter in model.named_parameters()]
    paths = {id(parameter): path for path, parameter in named}
    if any(id(parameter) not in paths for parameter in parameters):
        trained = [(path, parameter) for path, parameter in named if parameter.requires_grad]
        if [p.shape for p in parameters] == [p.shape for _, p in trained]:
            paths |= {id(copy): path for copy, (path, _) in zip(parameters, trained, strict=True)}
    return {id(parameter): paths.get(id(parameter), NONE) for parameter in parameters} | paths


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from _tensors(value, f"{name}.{number}" if name else str(number))


def value_rows(kind: str, values: Iterable[Any], ledger: Ledger) -> Iterator[Held]:
    """A row for each tensor in the values that was not counted before."""
    for value in values:
        for name, tensor in _tensors(dict(value) if isinstance(value, Mapping) else value):
            yield from _rows(kind, name or NONE, tensor, ledger)
