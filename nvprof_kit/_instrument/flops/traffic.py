"""Least memory traffic of operators: what each reads and writes, and how much of it must cross the GPU's memory.

An operator reads its inputs and writes its outputs, each storage once, and again what a second kernel of it reads. What
it finds in the L2 costs no memory traffic, and what is overwritten there is never written back. `Cache` follows this
through a step. The L2 does not evict strictly by age, so it keeps twice the size of the L2, of larger tensors a part.
So the traffic is what the same operators need at least.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from nvprof_kit._operators import OVERWRITES, SCATTERS, SELECTS, arguments_read_again, causal_share

_L2_BYTES = 50 * 2**20
"""Size of the L2 of an H100, assumed where the counted step runs on a CPU."""

_READS_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
"""Endings of operators that read no element of ``self``."""

_UNREAD = {"nll_loss_backward": "self", "nll_loss2d_backward": "self"}
"""Arguments that are passed for their shape."""


Storage = tuple[int, int]
"""Where it begins, and its length in bytes."""

Views = dict[tuple[int, int], int]
"""Bytes of the views of a storage, by where they begin and their size: views of the same place count once."""


@dataclass(eq=False)
class Run:
    """One run of an operator.

    Attributes:
        operator: Its name, such as ``aten::mm``.
        dtype: Type of the multiplied numbers; '' if it multiplies no matrices.
        flops: Floating point operations.
        least_flops: The same without what a causal mask leaves out.
        bytes: Bytes of its inputs and outputs, each storage once for each kernel.
        dram_bytes: Bytes of these that the L2 cannot hold from one operator to the next.
    """

    operator: str
    dtype: str = ""
    flops: int = 0
    least_flops: int = 0
    bytes: int = 0
    dram_bytes: int = 0


@dataclass
class _Storage:
    """Memory that is in the L2: its end, how much of it is there, and how much of that is to be written back."""

    end: int
    resident: int = 0
    dirty: int = 0
    writer: Run | None = None


class Cache:
    """An L2 that evicts what was used least recently, of twice its real size; it serves no operator more than its size.

    Args:
        size: Bytes of the L2.
    """

    def __init__(self, size: int) -> None:
        self._size, self._capacity, self._resident = size, 2 * size, 0
        self._storages: OrderedDict[int, _Storage] = OrderedDict()
        self._starts: list[int] = []
        self._was_full = False
        self._runs: list[Run] = []

    def add(self, run: Run, accesses: Accesses) -> None:
        """Add what an operator reads and writes to its run."""
        self._runs.append(run)
        for storages, is_write in ((accesses.reads, False), (accesses.read_again, False), (accesses.writes, True)):
            left = self._size
            for (start, length), views in storages.items():
                size = min(sum(views.values()), length)  # views may overlap
                storage = self._touch(start, length)
                run.bytes += size
                if is_write:
                    storage.dirty, storage.writer = max(storage.dirty, size), run
                else:
                    hits = min(size, storage.resident, left)
                    left -= hits
                    run.dram_bytes += size - hits
                self._resident += max(size - storage.resident, 0)
                storage.resident = max(size, storage.resident)
                self._evict()

    def end(self) -> None:
        """The step is over: the next one evicts what is left. A step that fits into the L2 needs no memory traffic."""
        if self._was_full:
            self._capacity = 0
            self._evict()
        else:
            for run in self._runs:
                run.dram_bytes = 0
        self._runs.clear()

    def _touch(self, start: int, length: int) -> _Storage:
        """The entry of a storage, now the most recent; memory that was freed and is now used by it is dropped."""
        storage = self._storages.get(start)
        if storage is None or storage.end != start + length:
            position = bisect_left(self._starts, start)
            if position and self._storages[self._starts[position - 1]].end > start:
                position -= 1
            while position < len(self._starts) and self._starts[position] < start + length:
                self._resident -= self._storages.pop(self._starts.pop(position)).resident
            storage = self._storages[start] = _Storage(start + length)
            insort(self._starts, start)
        self._storages.move_to_end(start)
        return storage

    def _evict(self) -> None:
        while self._resident > self._capacity:
            self._was_full = True
            start, storage = next(iter(self._storages.items()))
            evicted = min(storage.resident, self._resident - self._capacity)
            storage.resident -= evicted
            self._resident -= evicted
            if storage.writer is not None:
                storage.writer.dram_bytes += max(storage.dirty - storage.resident, 0)
                storage.dirty = min(storage.dirty, storage.resident)
            if not storage.resident:
                del self._storages[start], self._starts[bisect_left(self._starts, start)]


def l2_bytes() -> int:
    """Size of the L2 of the GPU in use, or of an H100 without a GPU."""
    if torch.cuda.is_initialized():
        size = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
        return int(size) or _L2_BYTES
    return _L2_BYTES


def named_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an ``OpOverload`` by name."""
    return {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)} | kwargs


class Accesses(NamedTuple):
    """What an operator does to memory.

    Attributes:
        reads, writes: The views of each storage, and the bytes of each that are read or written.
        read_again: Those of `reads` that a second kernel reads.
        created: The storages that it allocated.
    """

    reads: dict[Storage, Views]
    read_again: dict[Storage, Views]
    writes: dict[Storage, Views]
    created: set[Storage]


def accesses_of(schema: Any, arguments: dict[str, Any], out: Any) -> Accesses:
    """What an operator reads, writes and allocates.

    Args:
        schema: The operator's schema.
        arguments: Its arguments by name.
        out: Its result.
    """
    name = schema.name.partition("::")[2]
    inputs = [(argument, _dense(arguments.get(argument.name))) for argument in schema.arguments]
    storages = {_storage(tensor) for _, tensors in inputs for tensor in tensors}
    results = [tensor for tensor in _dense(out) if _storage(tensor) not in storages]
    created = {_storage(tensor) for tensor in results}
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for argument, tensors in inputs:
        if _UNREAD.get(name) == argument.name or (argument.name == "self" and name.endswith(_READS_SHAPE_ONLY)):
            continue
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and arguments.get("grad_scale") is None:
            is_written = False  # a fused optimizer writes gradients only to scale them
        if is_written:
            writes += tensors
        if not is_written or not (argument.is_out or name in OVERWRITES):
            reads += tensors
    writes += results
    if not writes or name.startswith(("empty", "_unsafe_view", "_reshape_alias", "resize_", "set_", "lift")):
        return Accesses({}, {}, {}, created)  # it only allocates, views, or reads a number back
    limits = _row_limits(name, arguments, reads, writes)
    number = arguments_read_again(name, arguments.get("output_mask"))
    second_reads = [arguments[argument.name] for argument in schema.arguments[:number]]
    return Accesses(_views(reads, limits), _views(second_reads, {}), _views(writes, limits), created)


def _row_limits(
    name: str, arguments: dict[str, Any], reads: list[torch.Tensor], writes: list[torch.Tensor]
) -> dict[int, int]:
    """Bytes that are used, by the id of a tensor of which the operator selects rows."""
    limits = {}
    if name in SELECTS:
        table = arguments[SELECTS[name]]
        rows = int(arguments["target"].numel()) * table.element_size() if name.startswith("nll") else None
        limits[id(table)] = sum(map(_size, writes)) if rows is None else rows
    if name in SCATTERS:
        table = arguments["self"]
        limits[id(table)] = sum(_size(read) for read in reads if read is not table and read.is_floating_point())
    offsets, weights = arguments.get("offs"), arguments.get("mat2", arguments.get("mat_b"))
    if "grouped_mm" in name and isinstance(offsets, torch.Tensor) and weights is not None and weights.dim() == 3:
        busy = int((torch.diff(offsets, prepend=offsets.new_zeros(1)) > 0).sum())  # experts with a token
        limits[id(weights)] = _size(weights) * busy // weights.shape[0]
    return limits


def computed_share(name: str, arguments: dict[str, Any]) -> float:
    """Share of the scores that a causal mask leaves to compute; 1 for an operator without one."""
    if not name.endswith(("attention", "attention_backward", "attention_for_cpu", "attention_for_cpu_backward")):
        return 1.0
    query, key = arguments.get("query"), arguments.get("key")
    if not arguments.get("is_causal") or not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        return 1.0
    return causal_share(query.shape[-2], key.shape[-2])


def _dense(value: Any) -> list[torch.Tensor]:
    """The strided tensors in an argument or a result, on the GPU where one is in use."""
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [
        tensor
        for tensor in tensors
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == device
    ]


def _size(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a tensor, which may be expanded."""
    lengths = (
        length if stride else min(length, 1) for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(math.prod(lengths) * tensor.element_size())


def _storage(tensor: torch.Tensor) -> Storage:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _views(tensors: Iterable[torch.Tensor], limits: dict[int, int]) -> dict[Storage, Views]:
    """The views of each storage."""
    views: dict[Storage, Views] = {}
    for tensor in tensors:
        size = min(_size(tensor), limits.get(id(tensor), sys.maxsize))
        if size:
            views.setdefault(_storage(tensor), {})[tensor.data_ptr(), size] = size
    return views
