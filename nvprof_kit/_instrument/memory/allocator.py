"""What PyTorch's CUDA caching allocator says: its counters at the begin and end of each layer call, the call's largest
allocation, and its blocks in use that contain no known tensor.

PyTorch keeps some memory that no Python object refers to. Blocks without a known tensor are classified by size: all
cuBLAS workspaces of a device have the same size, and autocast's cached copy of a weight has the weight's size in
autocast's dtype.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from nvprof_kit._instrument.memory.tensors import Counts, Held
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import LAYER_CATEGORIES, Category, strip_wrappers

_PREFIX = "nvprof_kit:call:"
_EVENTS = 200_000
"""Maximum number of allocator events kept between two readings."""


def cuda_counts(device: int | torch.device) -> Counts:
    """Counters of PyTorch's allocator of a CUDA device; resets ``max_memory_allocated``."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = stats["allocated_bytes"]["all"]
    requested = stats.get("requested_bytes", stats["allocated_bytes"])["all"]["current"]
    torch.cuda.reset_peak_memory_stats(device)
    return Counts(allocated["current"], requested, stats["reserved_bytes"]["all"]["current"], allocated["peak"])


@dataclass
class Boundary:
    """One call of a layer in one phase; sizes in bytes.

    Attributes:
        layer: Path of the layer.
        phase: ``forward``, ``backward`` or ``recompute``.
        number: Number of the call.
        caller: Number of the enclosing call on the thread; None for an outermost call.
        start: Bytes allocated at the begin.
        peak: Maximum of the allocated bytes during the call.
        step: Number of the step.
        seconds: End of the call, in seconds since the profiler was created.
        end: Bytes allocated at the end.
        reserved: Bytes reserved from CUDA at the end.
        largest: Largest allocation in the call, including nested layers; None if unknown.
    """

    layer: str
    phase: str
    number: int
    caller: int | None
    start: int
    peak: int
    step: int = 0
    seconds: float = 0.0
    end: int = 0
    reserved: int = 0
    largest: int | None = None

    @property
    def retained(self) -> int:
        """Bytes that the call left allocated; negative if it freed more."""
        return self.end - self.start

    @property
    def transient(self) -> int:
        """Bytes that the call needed temporarily, above the larger of `start` and `end`."""
        return self.peak - max(self.start, self.end)


class History:
    """The allocator history of one CUDA device, recorded without stacks; events are labeled with the number of a call.

    PyTorch records one history at a time. If another recording is active, or before PyTorch 2.9, which added labels,
    this class records nothing.

    Args:
        device: Device ordinal.
        memory: The module ``torch.cuda.memory``.
    """

    def __init__(self, device: int, memory: Any = torch.cuda.memory) -> None:
        self._device = device
        self._memory = memory
        self._recording = False

    def start(self) -> None:
        """Start recording."""
        is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        by_others = _snapshot_runs() or bool(is_enabled and torch.cuda.is_available() and is_enabled())
        if hasattr(self._memory, "_set_memory_metadata") and not by_others:
            self._record()
            self._recording = True

    def stop(self) -> None:
        """Stop recording."""
        recording, self._recording = self._recording, False
        if recording:
            self.label(None)
            if not _snapshot_runs():
                self._memory._record_memory_history(enabled=None)

    def label(self, number: int | None) -> None:
        """Label later allocations with the number of a call."""
        if self._recording:
            self._memory._set_memory_metadata("" if number is None else f"{_PREFIX}{number}")

    def take(self) -> dict[int, int] | None:
        """Largest allocation of each call since the last reading, in bytes; None if not recording."""
        if not self._recording or _snapshot_runs():
            return None
        largest: dict[int, int] = {}
        for event in self._memory._snapshot()["device_traces"][self._device]:
            label = event.get("user_metadata") or ""
            if event["action"] == "alloc" and label.startswith(_PREFIX):
                number = int(label.removeprefix(_PREFIX))
                largest[number] = max(largest.get(number, 0), event["size"])
        self._record()
        return largest

    def _record(self) -> None:
        try:
            self._memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=_EVENTS, clear_history=True
            )
        except TypeError:  # older PyTorch cannot clear the history; reading events twice does not change a maximum
            self._memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=_EVENTS)


def _snapshot_runs() -> bool:
    from nvprof_kit._instrument.memory import snapshot

    return snapshot._running is not None


class Boundaries:
    """Reads the allocator at the begin and end of each layer range.

    A peak counts for every open call, and for the time since the last call of `counts`.

    Args:
        read: Reads the allocator's counters and resets the peak.
        history: Reports the largest allocations.

    Attributes:
        seen: The completed calls.
        step: Step number to record with calls.
    """

    def __init__(self, read: Callable[[], Counts], history: History | None = None) -> None:
        self.seen: list[Boundary] = []
        self.step = 0
        self._read_counts = read
        self._history = history
        self._numbers = count()
        self._largest: dict[int, int] = {}
        self._settled = 0
        self._open: dict[int, list[Boundary]] = {}
        self._peak = 0
        self._began = time.perf_counter()

    def entered(self, range_: Range) -> None:
        """A range has opened."""
        if range_.category in LAYER_CATEGORIES:
            allocated = self._read().allocated
            calls = self._open.setdefault(threading.get_ident(), [])
            phase, caller = range_.category.value, calls[-1].number if calls else None
            layer = range_.text if range_.category is Category.FORWARD else range_.text.removesuffix(f" {phase}")
            calls.append(Boundary(layer, phase, next(self._numbers), caller, allocated, allocated))
            self._label(calls[-1].number)

    def left(self, range_: Range) -> None:
        """A range has closed."""
        calls = self._open.get(threading.get_ident())
        if range_.category not in LAYER_CATEGORIES or not calls:
            return
        counts = self._read()
        call = calls.pop()
        call.step, call.seconds = self.step, time.perf_counter() - self._began
        call.end, call.reserved = counts.allocated, counts.reserved
        self._label(call.caller)
        self.seen.append(call)

    def settle(self) -> None:
        """Set the largest allocations of the completed calls."""
        allocations = None if self._history is None else self._history.take()
        if allocations is None:
            return
        for number, size in allocations.items():
            self._largest[number] = max(self._largest.get(number, 0), size)
        for call in self.seen[self._settled :]:  # each ended before its caller
            call.largest = self._largest.pop(call.number, 0)
            if call.caller is not None:
                self._largest[call.caller] = max(self._largest.get(call.caller, 0), call.largest)
        self._settled = len(self.seen)

    def counts(self) -> Counts:
        """The counters now, with the peak since the last call of `counts`."""
        self.settle()
        counts = self._read()
        peak, self._peak = self._peak, 0
        return replace(counts, peak=peak)

    def _label(self, number: int | None) -> None:
        if self._history is not None:
            self._history.label(number)

    def _read(self) -> Counts:
        counts = self._read_counts()
        self._peak = max(self._peak, counts.peak)
        for calls in self._open.values():
            for call in calls:
                call.peak = max(call.peak, counts.peak)
        return counts


WORKSPACE, AUTOCAST, UNEXPLAINED = "workspace", "autocast", "unexplained"
"""Kinds of this memory: cuBLAS workspaces, autocast's copies of weights, and the rest."""

_LISTED = 8
"""Number of sizes of unexplained blocks with a row of their own."""


class Block(NamedTuple):
    """A block in use: its address, its size, and the requested bytes."""

    address: int
    size: int
    requested: int


def cuda_blocks(device: int) -> list[Block]:
    """The blocks in use of PyTorch's allocator on a CUDA device."""
    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # older PyTorch
        segments = torch.cuda.memory_snapshot()
    return [
        Block(block["address"], block["size"], block.get("requested_size", block["size"]))
        for segment in segments
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def unknown_blocks(blocks: Iterable[Block], addresses: Iterable[int]) -> list[Block]:
    """The blocks that contain none of the known addresses."""
    places = sorted(addresses)
    places.append(1 << 64)
    return [block for block in blocks if places[bisect_left(places, block.address)] >= block.address + block.size]


def workspace_bytes(capability: tuple[int, int], environ: Mapping[str, str] = os.environ) -> int:
    """Size of the workspace that PyTorch allocates per cuBLAS handle.

    From ``CUBLAS_WORKSPACE_CONFIG`` (pairs ``:KIB:COUNT``), else 32 MiB on Hopper and 8.125 MiB elsewhere
    (``parseChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp`` of PyTorch 2.11).
    """
    setting = environ.get("CUBLAS_WORKSPACE_CONFIG", "").split(":")[1:]
    if len(setting) >= 2 and len(setting) % 2 == 0 and all(word.isdecimal() for word in setting):
        return sum(int(size) * int(times) * 1024 for size, times in zip(setting[::2], setting[1::2], strict=True))
    return 4096 * 8 * 1024 if capability == (9, 0) else 4096 * 2 * 1024 + 16 * 8 * 1024


def cast_weights(model: nn.Module, device: torch.device) -> Iterator[tuple[str, int]]:
    """Path of each weight that autocast can cache, and the bytes of the cached copy; empty outside autocast."""
    if not torch.is_autocast_enabled(device.type) or not torch.is_autocast_cache_enabled():
        return
    itemsize = torch.get_autocast_dtype(device.type).itemsize
    for path, weight in model.named_parameters():
        if weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and weight.device == device:
            yield strip_wrappers(path), weight.numel() * itemsize


def unknown_rows(
    device: torch.device,
    in_use: Iterable[Block],
    addresses: Iterable[int],
    *,
    workspace: int,
    casts: Iterable[tuple[str, int]],
    unexplained: int,
) -> Iterator[Held]:
    """Classify the blocks that contain no known tensor; the rows add up to the unexplained bytes.

    Args:
        device: The device, for the rows.
        in_use: The blocks in use.
        addresses: Addresses of the storages already counted.
        workspace: Bytes of a cuBLAS workspace; 0 if there is none.
        casts: Weights that autocast may have cached, with the bytes of the copy.
        unexplained: Number of unexplained bytes.
    """
    here = str(device)
    sizes = Counter(block.requested for block in unknown_blocks(in_use, addresses))
    rows: list[Held] = []
    if workspace and sizes[workspace]:
        rows.append(Held(WORKSPACE, "cublas", sizes.pop(workspace) * workspace, here))
    for path, size in casts:
        if sizes[size] > 0:
            sizes[size] -= 1
            rows.append(Held(AUTOCAST, path, size, here))
    totals = sorted(((size * blocks, size, blocks) for size, blocks in sizes.items() if blocks), reverse=True)
    rows += [Held(UNEXPLAINED, f"{blocks} of {size} bytes", total, here) for total, size, blocks in totals[:_LISTED]]
    yield from rows
    yield Held(UNEXPLAINED, "", unexplained - sum(row.bytes for row in rows), here)
