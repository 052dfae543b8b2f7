"""The kernels of a capture by signature: what is launched in the same way costs the same, so one measured launch
stands for all of its kind.

A signature is the kernel's name, its grid, its block, and what a thread and a block take: registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.attribution import Attribution, attribute
from nvprof_kit.analysis.nesting import NONE, Int64Array
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER, RangeName
from nvprof_kit.trace.schema import OP_KINDS, Trace

CONFIG = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers", "shared_bytes")
"""Optional columns of `Trace.ops` that, with the name, make a signature."""

NEEDED = ("name", "mangled", *CONFIG)
"""Optional columns that `read_kernels` needs."""


@dataclass(frozen=True)
class Signature:
    """How a kernel was launched.

    Attributes:
        name: Its name with parameters and template arguments.
        grid, block: Blocks of the launch, threads of a block.
        registers: Registers of a thread, -1 where it is not known.
        shared_bytes: Shared memory of a block, static and dynamic, -1 where it is not known.
        mangled: The name the linker knows it by, '' where it is not known.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int = -1
    shared_bytes: int = -1
    mangled: str = ""


@dataclass(frozen=True)
class Kernels:
    """The kernel launches of a capture; arrays have the shape ``(k,)``, an element for each launch.

    Attributes:
        signatures: The distinct signatures.
        signature: Index into `signatures`.
        duration: Time on the GPU in ns.
        owners: The distinct (layer, phase) pairs that launches and other operations belong to, by their first start.
        owner: Index into `owners`.
        other_ns: Time of copies, memsets and whole-graph replays by owner, shape of `owners`: no profiler counts for
            them.
        range_names: Every range of the capture, by text and category.
    """

    signatures: tuple[Signature, ...]
    signature: npt.NDArray[np.intp]
    duration: Int64Array
    owners: tuple[tuple[str, str], ...]
    owner: npt.NDArray[np.intp]
    other_ns: Int64Array
    range_names: tuple[RangeName, ...]

    def by_owner(self) -> Int64Array:
        """Time by owner and signature in ns, shape ``(owners, signatures)``."""
        shape = (len(self.owners), len(self.signatures))
        cell = self.owner * shape[1] + self.signature
        sums = np.bincount(cell, weights=self.duration, minlength=shape[0] * shape[1])
        return sums.astype(np.int64).reshape(shape)

    def launches(self) -> Int64Array:
        """Number of launches by owner and signature, shape ``(owners, signatures)``."""
        shape = (len(self.owners), len(self.signatures))
        return np.bincount(self.owner * shape[1] + self.signature, minlength=shape[0] * shape[1]).reshape(shape)


def read_kernels(trace: Trace) -> Kernels:
    """The kernels of a capture by signature and owner.

    Args:
        trace: A capture with the optional columns `NEEDED`.

    Raises:
        CaptureError: The capture does not say how its kernels were launched.
    """
    ops = trace.ops
    if any(name not in ops for name in NEEDED):
        raise CaptureError(
            f"{trace.info.path}: it does not say how its kernels were launched (grid, block, registers); needed a "
            "capture of nsys"
        )
    owned = attribute(trace)
    owners, owner = _owners(owned, ops["start_ns"].to_numpy())
    duration = (ops["end_ns"] - ops["start_ns"]).to_numpy()
    kernel = np.flatnonzero(ops["kind"].to_numpy() == OP_KINDS.index("kernel"))
    other = np.ones(len(ops), dtype=bool)
    other[kernel] = False
    other_ns = np.bincount(owner[other], weights=duration[other], minlength=len(owners)).astype(np.int64)
    signatures, signature = _signatures(trace, kernel)
    names = owned.ranges.names
    return Kernels(signatures, signature, duration[kernel], owners, owner[kernel], other_ns, names)


def _owners(owned: Attribution, start: Int64Array) -> tuple[tuple[tuple[str, str], ...], npt.NDArray[np.intp]]:
    """The distinct (layer, phase) pairs by their first start, and which of them each operation belongs to."""
    name = np.append(owned.ranges.name, NONE)[owned.layer_range]
    codes, index = np.unique(name.astype(np.int64) * len(owned.phases) + owned.phase, return_inverse=True)
    first = np.full(len(codes), np.iinfo(np.int64).max)
    np.minimum.at(first, index, start)
    layers, phases = (part.tolist() for part in np.divmod(codes, len(owned.phases)))
    pairs = [
        (NO_LAYER if layer == NONE else owned.ranges.names[layer].text, owned.phases[phase])
        for layer, phase in zip(layers, phases, strict=True)
    ]
    distinct = list(dict.fromkeys(pairs[place] for place in np.argsort(first, kind="stable").tolist()))
    return tuple(distinct), np.array([distinct.index(pair) for pair in pairs], dtype=np.intp)[index]


def _signatures(trace: Trace, kernel: Int64Array) -> tuple[tuple[Signature, ...], npt.NDArray[np.intp]]:
    """The distinct signatures of the operations that are kernels, and which of them each is."""
    ops = trace.ops
    columns = [ops[name].cat.codes.to_numpy()[kernel].astype(np.int64) for name in ("name", "mangled")]
    columns += [ops[name].to_numpy()[kernel] for name in CONFIG]
    index = np.zeros(len(kernel), dtype=np.intp)
    for column in columns:  # pair by pair, so that no row is ever compared as a whole
        distinct, code = np.unique(column, return_inverse=True)
        _, index = np.unique(index * max(len(distinct), 1) + code, return_inverse=True)
    first = np.full(int(index.max(initial=-1)) + 1, len(kernel), dtype=np.int64)
    np.minimum.at(first, index, np.arange(len(kernel)))
    names, mangled = ops["name"].cat.categories, ops["mangled"].cat.categories
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    signatures = tuple(
        Signature(names[name], tuple(rest[:3]), tuple(rest[3:6]), rest[6], rest[7], mangled[linker])
        for name, linker, *rest in rows
    )
    return signatures, index
