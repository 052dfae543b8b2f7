"""Which tensors hold memory, by module: parameters, gradients, master copies, optimizer state, and those that autograd
saves for the backward pass.

Bytes are storage bytes, each counted once: tied weights and views add nothing. A ``DTensor`` counts as its local shard,
a wrapper tensor (quantized, nested) as its inner tensors.

Saved-tensor hooks see every tensor that autograd saves. The object that the pack hook returns is destroyed when
autograd releases the tensor, so the saved tensors are known at any time. The hooks keep no other tensor alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from nvprof_kit._instrument.loop.loop import innermost
from nvprof_kit._instrument.patches import Stack, Untraced, uncompiled, uncompiled_itself
from nvprof_kit._instrument.ranges.ranges import put_around
from nvprof_kit.names import strip_wrappers

PARAMS, GRADS, OS_PARAMS, OS_STATE, ACTIVATION = "params", "grads", "os_params", "os_state", "activation"
KINDS = (PARAMS, GRADS, OS_PARAMS, OS_STATE, ACTIVATION)
"""Parameters, gradients, the optimizer's copies of parameters, its state, and tensors saved by autograd."""

NONE = "(none)"
_MASTER = ("master", "fp32")
"""Parts of the keys under which optimizers store a master copy in a parameter's state."""


class Row(NamedTuple):
    """Some bytes: their kind, the path of the owner, and their device."""

    kind: str
    path: str
    bytes: int
    device: str


class Ledger:
    """Counts tensors, each byte of a storage once.

    Attributes:
        addresses: Addresses of all counted storages.
    """

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self._counted: dict[int, list[tuple[int, int]]] = {}

    def count(self, kind: str, path: str, tensor: torch.Tensor) -> Iterator[Row]:
        """A row for each plain tensor in a tensor, with its bytes that were not counted before."""
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            self.addresses.add(storage.data_ptr())
            covered = self._counted.setdefault(storage._cdata, [])
            spans = [extent(plain)]
            for start, end in covered:
                spans = [
                    (low, high)
                    for first, last in spans
                    for low, high in ((first, min(last, start)), (max(first, end), last))
                    if low < high
                ]
            covered += spans
            size = sum(high - low for low, high in spans)
            if size:
                yield Row(kind, path, size, str(plain.device))

    def count_storage(self, tensor: torch.Tensor) -> int:
        """Bytes of a plain tensor's storage; 0 if any of it was counted before."""
        storage = tensor.untyped_storage()
        self.addresses.add(storage.data_ptr())
        if storage._cdata in self._counted:
            return 0
        size = int(storage.nbytes())
        self._counted[storage._cdata] = [(0, size)]
        return size


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors in a tensor on this rank, except those without memory."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        yield from plain_tensors(local)
    elif type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Start and end (exclusive) of a tensor in its storage, in bytes."""
    if tensor.numel() == 0:
        return 0, 0
    spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return start, min(start + (spread + 1) * tensor.itemsize, tensor.untyped_storage().nbytes())


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(strip_wrappers(path), parameter) for path, parameter in model.named_parameters()]


def model_rows(model: nn.Module, ledger: Ledger) -> Iterator[Row]:
    """A row for each parameter, buffer and gradient."""
    named = _named(model)
    for path, parameter in named:
        yield from ledger.count(PARAMS, path, parameter)
    for path, buffer in model.named_buffers():
        yield from ledger.count("buffers", strip_wrappers(path), buffer)
    for path, parameter in named:
        if parameter.grad is not None:
            yield from ledger.count(GRADS, path, parameter.grad)


def optimizer_rows(model: nn.Module, optimizer: Any, ledger: Ledger) -> Iterator[Row]:
    """A row for each master copy, its gradient, and each state tensor of an optimizer or of its inner optimizers.

    The parameters of an optimizer are the model's, or master copies of them in the same order.
    """
    named = _named(model)
    trained = [(path, parameter) for path, parameter in named if parameter.requires_grad]
    for inner in innermost(optimizer):
        parameters = [parameter for group in getattr(inner, "param_groups", ()) for parameter in group["params"]]
        paths = {id(parameter): path for path, parameter in named}
        if [parameter.shape for parameter in parameters] == [parameter.shape for _, parameter in trained]:
            paths |= {id(copy): path for copy, (path, _) in zip(parameters, trained, strict=True)}
        for parameter in parameters:
            path = paths.get(id(parameter), NONE)
            yield from ledger.count(OS_PARAMS, path, parameter)
            if parameter.grad is not None:
                yield from ledger.count(GRADS, path, parameter.grad)
        for parameter, state in getattr(inner, "state", {}).items():
            path = paths.get(id(parameter), NONE)
            for name, tensor in _tensors(state):
                kind = OS_PARAMS if any(word in name for word in _MASTER) else OS_STATE
                yield from ledger.count(kind, f"{path}.{name}" if name else path, tensor)


def value_rows(kind: str, values: Iterable[Any], ledger: Ledger) -> Iterator[Row]:
    """A row for each tensor in the values that was not counted before."""
    for value in values:
        for name, tensor in _tensors(dict(value) if isinstance(value, Mapping) else value):
            yield from ledger.count(kind, name or NONE, tensor)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))


_innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the innermost saved-tensor hooks of the thread; None before PyTorch 2.6."""


class _Saved:
    """A tensor saved by autograd, until autograd releases it, with the path of the module that saved it.

    The hook's argument may be a view of the output of the node that saves it. Keeping it would create a reference cycle
    that leaks a discarded graph; its ``data`` shares the memory without referring to the node.
    """

    __slots__ = ("__weakref__", "path", "tensor")

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.tensor = tensor.data


class SavedTensors:
    """Tracks saved tensors while installed; a storage saved by several modules counts for the first of them.

    Args:
        model: The model that gives the paths.

    Attributes:
        hidden: Modules whose forward ran with gradients where these hooks were not the innermost: under other
            saved-tensor hooks, or on another thread, because hooks are per thread. Empty before
            PyTorch 2.6, which cannot tell.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hidden: set[str] = set()
        self._saved: WeakValueDictionary[int, _Saved] = WeakValueDictionary()
        self._numbers = count()
        self._calls = Stack()
        named = [
            (strip_wrappers(path) or type(module).__name__, module)
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._followed = Untraced(  # a compiled module is one call
            lambda: [put_around(module, partial(self._call, path, module)) for path, module in named]
        )
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved
        )
        self._hooks.__enter__()

    def remove(self) -> None:
        """Remove the hooks; saved tensors stay known until autograd releases them."""
        self._hooks.__exit__(None, None, None)
        self._followed.remove()

    def rows(self, ledger: Ledger) -> list[Row]:
        """A row for each module and device: the bytes saved now that were not counted before."""
        sums: Counter[tuple[str, str]] = Counter()
        for saved in list(self._saved.values()):
            for plain in plain_tensors(saved.tensor):
                sums[saved.path, str(plain.device)] += ledger.count_storage(plain)
        return [Row(ACTIVATION, path, size, device) for (path, device), size in sums.items() if size]

    def _pack(self, tensor: torch.Tensor) -> Any:
        storages = set()
        for plain in plain_tensors(tensor):  # one may stand for another while PyTorch 2.4 traces in these hooks
            traced = isinstance(plain, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(plain)
            if traced or plain.untyped_storage().device.type == "meta":
                return tensor
            storages.add(plain.untyped_storage()._cdata)
        path, module = self._calls.items[-1] if self._calls.items else (NONE, None)
        for weight in () if module is None else module._parameters.values():  # FSDP's hooks have gathered them by now
            if weight is not None and any(p.untyped_storage()._cdata in storages for p in plain_tensors(weight)):
                return tensor.data  # parameters are not activations
        saved = self._saved[next(self._numbers)] = _Saved(path, tensor)
        return saved

    @uncompiled_itself
    def _call(self, path: str, module: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._enter(path, module)
        try:
            return function(*args, **kwargs)
        finally:
            self._calls.items.pop()

    @uncompiled
    def _enter(self, path: str, module: nn.Module) -> None:
        if torch.is_grad_enabled() and _innermost_hooks is not None:
            pack = (_innermost_hooks(False) or [None])[0]
            is_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"  # it saves nothing to count
            if getattr(pack, "__self__", None) is not self and not is_checkpoint:
                self.hidden.add(path)
        self._calls.items.append((path, module))
