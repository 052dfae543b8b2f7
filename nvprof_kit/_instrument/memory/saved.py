"""Tensors that autograd saves for the backward pass, by module.

Saved-tensor hooks see every tensor that autograd saves. The object that the pack hook returns is destroyed when
autograd releases the tensor, so the saved storages are known at any time. The hooks keep no other tensor alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

from nvprof_kit._instrument.memory.tensors import ACTIVATION, NONE, Held, Ledger, parts
from nvprof_kit._instrument.patches import Hook, Patch, Stack, pause_while_tracing
from nvprof_kit.names import strip_wrappers


class _Innermost:
    """The innermost saved-tensor hooks of each thread, which are the ones that pack.

    Older PyTorch has no function to query them, so there pushes and pops are tracked.
    """

    def __init__(self) -> None:
        autograd = torch._C._autograd
        self._ask = getattr(autograd, "_top_saved_tensors_default_hooks", None)
        self._packs = Stack()
        self._patches: list[Patch] = []
        if self._ask is None:
            self._patches = [
                Patch(autograd, "_push_saved_tensors_default_hooks", self._pushing),
                Patch(autograd, "_pop_saved_tensors_default_hooks", self._popping),
            ]

    def remove(self) -> None:
        """Stop tracking."""
        for patch in self._patches:
            patch.remove()

    def pack(self) -> Any:
        """The innermost pack hook of this thread; None without hooks."""
        if self._ask is not None:
            hooks = self._ask(False)
            return None if hooks is None else hooks[0]
        packs = self._packs.items
        return packs[-1] if packs else None

    def _pushing(self, push: Callable[..., Any]) -> Callable[..., Any]:
        def noting(pack: Any, unpack: Any) -> Any:
            pushed = push(pack, unpack)
            self._packs.items.append(pack)
            return pushed

        return noting

    def _popping(self, pop: Callable[..., Any]) -> Callable[..., Any]:
        def noting() -> Any:
            popped = pop()
            if self._packs.items:
                self._packs.items.pop()
            return popped

        return noting


class _Storage:
    """A storage saved by autograd: the first module that saved it, its size and device, and how often it is saved."""

    __slots__ = ("address", "bytes", "count", "device", "path")

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.address = tensor.untyped_storage().data_ptr()
        self.bytes = tensor.untyped_storage().nbytes()
        self.device = str(tensor.device)
        self.count = 0


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
            saved-tensor hooks, or on another thread, because hooks are per thread.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hidden: set[str] = set()
        self._storages: dict[int, _Storage] = {}
        self._lock = threading.RLock()
        self._paths = Stack()
        self._weights: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being reused
        self._followed: list[tuple[nn.Module, Hook, Hook]] = []
        self._handles: list[Any] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        seen: set[int] = set()
        for path, module in model.named_modules():
            if id(module) not in seen and not isinstance(module, torch.jit.ScriptModule):
                seen.add(id(module))
                self._follow(strip_wrappers(path) or type(module).__name__, module)
        self.resume()
        self._untraced = pause_while_tracing(self)
        self._tops = _Innermost()
        self._hooks.__enter__()

    def remove(self) -> None:
        """Remove the hooks; saved tensors stay known until autograd releases them."""
        self._hooks.__exit__(None, None, None)
        self._tops.remove()
        self._untraced.remove()
        self.pause()
        self._followed = []

    def pause(self) -> bool:
        """Remove the hooks of the modules while the compiler traces; returns whether there were any."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        return bool(handles)

    def resume(self) -> None:
        """Install the hooks of the modules."""
        for module, enter, leave in self._followed:
            self._handles += [
                module.register_forward_pre_hook(enter.call),
                module.register_forward_hook(leave.call, always_call=True),
            ]

    def rows(self, ledger: Ledger) -> Iterator[Held]:
        """A row for each module and device: the bytes saved now that were not counted before."""
        sums: dict[tuple[str, str], int] = {}
        with self._lock:
            storages = list(self._storages.items())
        for key, storage in storages:
            if ledger.add_storage(key, storage.bytes, storage.address):
                owner = storage.path, storage.device
                sums[owner] = sums.get(owner, 0) + storage.bytes
        for (path, device), count in sums.items():
            yield Held(ACTIVATION, path, count, device)

    def keep(self, tensor: torch.Tensor) -> list[int]:
        """Count another reference to a tensor's storages; returns their keys."""
        path = self._path()
        keys = []
        with self._lock:
            for tensor_part in parts(tensor):
                key = tensor_part.untyped_storage()._cdata
                storage = self._storages.get(key)
                if storage is None:
                    storage = self._storages[key] = _Storage(path, tensor_part)
                storage.count += 1
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
        if any(tensor_part.untyped_storage()._cdata in self._weights for tensor_part in parts(tensor)):
            return tensor.data  # parameters are not activations
        return _Saved(tensor, self)

    def _follow(self, path: str, module: nn.Module) -> None:
        def enter(module: nn.Module, _args: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():  # a compiled region counts as the enclosing module
                self._note_weights(module)
                if torch.is_grad_enabled() and not self._innermost():
                    self.hidden.add(path)
                self._paths.items.append(path)

        def leave(_module: nn.Module, _args: Any, _outputs: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and self._paths.items:
                self._paths.items.pop()

        self._followed.append((module, Hook(enter), Hook(leave)))

    def _innermost(self) -> bool:
        """Whether autograd uses these hooks on this thread, or those of a checkpoint, which saves nothing to count."""
        pack = self._tops.pack()
        if pack is None:
            return False
        return getattr(pack, "__self__", None) is self or pack.__module__ == "torch.utils.checkpoint"

    def _note_weights(self, module: nn.Module) -> None:
        for weight in (*module._parameters.values(), *module._buffers.values()):
            for tensor in parts(weight) if weight is not None else ():
                storage = tensor.untyped_storage()
                if storage._cdata not in self._weights:
                    self._weights[storage._cdata] = StorageWeakRef(storage)

    def _path(self) -> str:
        paths = self._paths.items
        return paths[-1] if paths else NONE


def _unpack(saved: Any) -> torch.Tensor:
    """Return the original tensor."""
    tensor: torch.Tensor = saved.tensor if isinstance(saved, _Saved) else saved
    return tensor
