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
from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument.memory import snapshot
from nvprof_kit._instrument.memory.tensors import Ledger, Row
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import LAYER_CATEGORIES, Category, strip_wrappers

_LABEL = "nvprof_kit:call:"
_MAX_EVENTS = 200_000
"""Maximum number of allocator events kept between two readings."""


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


def cuda_counts(device: int | torch.device) -> Counts:
    """Counters of PyTorch's allocator of a CUDA device; resets ``max_memory_allocated``."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = stats["allocated_bytes"]["all"]
    requested, reserved = stats["requested_bytes"]["all"], stats["reserved_bytes"]["all"]
    torch.cuda.reset_peak_memory_stats(device)
    return Counts(allocated["current"], requested["current"], reserved["current"], allocated["peak"])


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
        device: Device ordinal; None to record nothing.
        memory: The module ``torch.cuda.memory``.
    """

    def __init__(self, device: int | None, memory: Any = torch.cuda.memory) -> None:
        self._device = device
        self._memory = memory
        self._recording = False

    def start(self) -> None:
        """Start recording."""
        is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        by_others = snapshot.is_recording() or bool(is_enabled and torch.cuda.is_available() and is_enabled())
        if self._device is not None and hasattr(self._memory, "_set_memory_metadata") and not by_others:
            self._record()
            self._recording = True

    def stop(self) -> None:
        """Stop recording."""
        self.label(None)
        if self._recording and not snapshot.is_recording():
            self._memory._record_memory_history(enabled=None)
        self._recording = False

    def label(self, number: int | None) -> None:
        """Label later allocations with the number of a call."""
        if self._recording:
            self._memory._set_memory_metadata("" if number is None else f"{_LABEL}{number}")

    def take(self) -> dict[int, int] | None:
        """Largest allocation of each call since the last reading, in bytes; None if not recording."""
        if not self._recording or snapshot.is_recording():
            return None
        largest: dict[int, int] = {}
        for event in self._memory._snapshot()["device_traces"][self._device]:
            label = event.get("user_metadata") or ""
            if event["action"] == "alloc" and label.startswith(_LABEL):
                number = int(label.removeprefix(_LABEL))
                largest[number] = max(largest.get(number, 0), event["size"])
        self._record()
        return largest

    def _record(self) -> None:
        self._memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=_MAX_EVENTS, clear_history=True
        )


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
        self._history = history or History(None)
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
            self._history.label(calls[-1].number)

    def left(self, range_: Range) -> None:
        """A range has closed."""
        calls = self._open.get(threading.get_ident())
        if range_.category not in LAYER_CATEGORIES or not calls:
            return
        counts = self._read()
        call = calls.pop()
        call.step, call.seconds = self.step, time.perf_counter() - self._began
        call.end, call.reserved = counts.allocated, counts.reserved
        self._history.label(call.caller)
        self.seen.append(call)

    def settle(self) -> None:
        """Set the largest allocations of the completed calls."""
        allocations = self._history.take()
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

    def _read(self) -> Counts:
        counts = self._read_counts()
        self._peak = max(self._peak, counts.peak)
        for calls in self._open.values():
            for call in calls:
                call.peak = max(call.peak, counts.peak)
        return counts


_MAX_SIZES = 8
"""Number of sizes of unexplained blocks with a row of their own."""


def cuda_blocks(device: int) -> list[dict[str, Any]]:
    """The blocks in use of PyTorch's allocator on a CUDA device, each with ``address``, ``size`` and
    ``requested_size``.
    """
    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # older PyTorch
        segments = torch.cuda.memory_snapshot()
    blocks = (block for segment in segments if segment["device"] == device for block in segment["blocks"])
    return [block for block in blocks if block["state"] == "active_allocated"]


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
    rows: Iterable[Row],
    ledger: Ledger,
    *,
    model: nn.Module,
    device: torch.device,
    counts: Counts,
    blocks: Iterable[Mapping[str, Any]] | None,
) -> list[Row]:
    """The allocated bytes that belong to no known tensor: rounding, cuBLAS workspaces, autocast's copies of weights,
    and the others by block size.

    Args:
        rows: The rows of the known tensors.
        ledger: Has counted these.
        model: The model, whose weights autocast may have copied.
        device: The device.
        counts: Its counters. The known and unknown rows add up to the allocated bytes.
        blocks: Its blocks in use, as `cuda_blocks`; None if the allocator does not list them.
    """
    addresses = [*sorted(ledger.addresses), 1 << 64]
    sizes: Counter[int] = Counter()
    for block in blocks or ():
        if addresses[bisect_left(addresses, block["address"])] >= block["address"] + block["size"]:
            sizes[block["requested_size"]] += 1
    name = str(device)
    unknown = [Row("rounding", "", counts.allocated - counts.requested, name)]
    workspace = workspace_bytes(torch.cuda.get_device_capability(device)) if sizes else 0
    if sizes[workspace]:
        unknown.append(Row("workspace", "cublas", sizes.pop(workspace) * workspace, name))
    for path, size in cast_weights(model, device):
        if sizes[size] > 0:
            sizes[size] -= 1
            unknown.append(Row("autocast", path, size, name))
    totals = sorted(((size * times, size, times) for size, times in sizes.items() if times), reverse=True)
    for total, size, times in totals[:_MAX_SIZES]:
        unknown.append(Row("unexplained", f"{times} of {size} bytes", total, name))
    explained = sum(row.bytes for row in [*rows, *unknown] if row.device == name)
    return [*unknown, Row("unexplained", "", counts.allocated - explained, name)]
