"""Classifies allocator blocks in use that contain no known tensor.

PyTorch keeps some memory that no Python object refers to. The allocator lists all blocks in use; blocks without a known
tensor are classified by size: all cuBLAS workspaces of a device have the same size, and autocast's cached copy of a
weight has the weight's size in autocast's dtype.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from nvprof_kit._instrument.memory.tensors import Held
from nvprof_kit.names import strip_wrappers

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
        return sum(int(size) * int(count) * 1024 for size, count in zip(setting[::2], setting[1::2], strict=True))
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
    blocks: Iterable[Block],
    addresses: Iterable[int],
    *,
    workspace: int,
    casts: Iterable[tuple[str, int]],
    unexplained: int,
) -> Iterator[Held]:
    """Classify the blocks that contain no known tensor; the rows add up to the unexplained bytes.

    Args:
        device: The device, for the rows.
        blocks: The blocks in use.
        addresses: Addresses of the storages already counted.
        workspace: Bytes of a cuBLAS workspace; 0 if there is none.
        casts: Weights that autocast may have cached, with the bytes of the copy.
        unexplained: Number of unexplained bytes.
    """
    here = str(device)
    sizes = Counter(block.requested for block in unknown_blocks(blocks, addresses))
    rows: list[Held] = []
    if workspace and (count := sizes.pop(workspace, 0)):
        rows.append(Held(WORKSPACE, "cublas", count * workspace, here))
    for path, size in casts:
        if sizes[size] > 0:
            sizes[size] -= 1
            rows.append(Held(AUTOCAST, path, size, here))
    largest = sorted(((size * count, size, count) for size, count in sizes.items() if count), reverse=True)
    rows += [Held(UNEXPLAINED, f"{count} of {size} bytes", total, here) for total, size, count in largest[:_LISTED]]
    yield from rows
    yield Held(UNEXPLAINED, "", unexplained - sum(row.bytes for row in rows), here)
