"""Tensors that autograd saves for the backward pass, by module.

Saved-tensor hooks see every tensor that autograd saves. The object that the pack hook returns is destroyed when
autograd releases the tensor, so the saved storages are known at any time. The hooks keep no other tensor alive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

from nvprof_kit._instrument.memory.tensors import ACTIVATION, NONE, Held, Ledger, parts
from nvprof_kit._instrument.modules.calls import put_around
from nvprof_kit._instrument.patches import Stack, Untraced, uncompiled, uncompiled_itself
from nvprof_kit.names import strip_wrappers

_innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the innermost saved-tensor hooks of the thread; None before PyTorch 2.6."""


@dataclass
class _Storage:
    """A storage saved by autograd: the first module that saved it, its size and device, and how often it is saved."""

    path: str
    address: int
    bytes: int
    device: str
    count: int = 0


class _Saved:
    """A tensor saved by autograd; its destruction releases the tensor.

    The hook's argument may be a view of the output of the node that saves it. Keeping it would create a reference cycle
    that leaks a discarded graph; its ``data`` shares the memory without referring to the node.
    """

    __slots__ = ("_keeper", "_keys", "tensor")

    def __init__(self, tensor: torch.Tensor, keeper: SavedTensors) -> None:
        self.tensor = tensor.data
        self._keeper = keeper
        self._keys = keeper.keep(tensor)

    def __del__(self) -> None:
        self._keeper.release(self._keys)


class SavedTensors:
    """Tracks saved tensors while installed; a storage saved by several modules counts once.

    Args:
        model: The model that gives the paths.

    Attributes:
        hidden: Modules whose forward ran with gradients where these hooks were not the innermost: under other
            saved-tensor hooks, or on another thread, because hooks are per thread. Empty before
            PyTorch 2.6, which cannot tell.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hidden: set[str] = set()
        self._storages: dict[int, _Storage] = {}
        self._lock = threading.RLock()
        self._calls = Stack()
        self._weights: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being reused
        self._modules = [
            (strip_wrappers(path) or type(module).__name__, module)
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved
        )
        self._followed = Untraced(  # a compiled module is one call
            lambda: [put_around(module, partial(self._call, path, module)) for path, module in self._modules]
        )
        self._hooks.__enter__()

    def remove(self) -> None:
        """Remove the hooks; saved tensors stay known until autograd releases them."""
        self._hooks.__exit__(None, None, None)
        self._followed.remove()
        self._modules = []

    def rows(self, ledger: Ledger) -> Iterator[Held]:
        """A row for each module and device: the bytes saved now that were not counted before."""
        sums: Counter[tuple[str, str]] = Counter()
        with self._lock:
            storages = list(self._storages.items())
        for key, storage in storages:
            if ledger.add_storage(key, storage.bytes, storage.address):
                sums[storage.path, storage.device] += storage.bytes
        for (path, device), count in sums.items():
            yield Held(ACTIVATION, path, count, device)

    def keep(self, tensor: torch.Tensor) -> list[int]:
        """Count another reference to a tensor's storages; returns their keys."""
        path = self._calls.items[-1][0] if self._calls.items else NONE
        keys = []
        with self._lock:
            for tensor_part in parts(tensor):
                storage = tensor_part.untyped_storage()
                key, device = storage._cdata, str(tensor_part.device)
                if key not in self._storages:
                    self._storages[key] = _Storage(path, storage.data_ptr(), storage.nbytes(), device)
                self._storages[key].count += 1
                keys.append(key)
        return keys

    def release(self, keys: list[int]) -> None:
        """Drop a reference to each storage."""
        with self._lock:
            for key in keys:
                storage = self._storages[key]
                storage.count -= 1
                if not storage.count:
                    del self._storages[key]

    def _pack(self, tensor: torch.Tensor) -> Any:
        for tensor_part in parts(tensor):  # one may stand for another while PyTorch 2.4 traces in these hooks
            traced = isinstance(tensor_part, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(tensor_part)
            if traced or tensor_part.untyped_storage().device.type == "meta":
                return tensor
        if self._calls.items:  # FSDP's hooks have gathered the module's weights since its call began
            self._note_weights(self._calls.items[-1][1])
        if any(tensor_part.untyped_storage()._cdata in self._weights for tensor_part in parts(tensor)):
            return tensor.data  # parameters are not activations
        return _Saved(tensor, self)

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
        self._note_weights(module)

    def _note_weights(self, module: nn.Module) -> None:
        for weight in (*module._parameters.values(), *module._buffers.values()):
            for tensor in parts(weight) if weight is not None else ():
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._weights[storage._cdata] = StorageWeakRef(storage)
