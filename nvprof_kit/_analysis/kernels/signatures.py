"""Kernels by launch signature: launches with the same signature take the same time, so one measurement represents all.

A signature is the kernel name, grid, block, registers per thread and shared memory per block. That does not always
suffice: a matrix product with a larger inner dimension (K) has the same signature and takes longer. So a signature is
divided by *role* (the layer path without numbers, and the phase) if the times of its roles differ, and by the position
of the launch in its layer call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.layers.tree import layer_parents
from nvprof_kit._trace.joins import distinct, distinct_rows
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER

Role = tuple[str, str]
"""Layer, with ``*`` for every number in its path, and phase."""

Ints = npt.NDArray[np.int64]

PLACES = 64
"""Maximum number of positions; further launches of a signature in one layer call count as the last position."""

APART = 1.2
"""Roles differ if their median times differ by this factor."""

LEAST_SHARE = 0.001
"""Signatures with a smaller share of the GPU time are not divided: their times are too short to compare."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def role_of(owner: tuple[str, str]) -> Role:
    """The role of a layer and phase: ``("layers.3.mlp", "forward")`` gives ``("layers.*.mlp", "forward")``."""
    return _NUMBER.sub("*", owner[0]), owner[1]


def divide_by_role(signature: Ints, role: Ints, duration: Ints) -> tuple[Ints, list[tuple[int, tuple[int, ...]]]]:
    """Divide signatures if the times of their roles, or of their roles and positions, differ.

    Args:
        signature: Signature of each launch, shape ``(k,)``.
        role: Role of each launch, ``(k,)``.
        duration: Duration of each launch, ``(k,)``.

    Returns:
        The kind of each launch, shape ``(k,)``; and for each kind its signature and its roles, which are empty if the
        signature was not divided.
    """
    width = int(role.max(initial=0)) + 1
    cell = signature * width + role
    order = np.lexsort((duration, cell))
    cells, first, counts = np.unique(cell[order], return_index=True, return_counts=True)
    medians = duration[order][first + counts // 2]
    times = np.bincount(signature, weights=duration)
    by_signature: dict[int, list[tuple[int, int]]] = {}
    for cell_code, median in zip(cells.tolist(), medians.tolist(), strict=True):
        by_signature.setdefault(cell_code // width, []).append((median, cell_code % width))
    kinds: list[tuple[int, tuple[int, ...]]] = []
    kind_of_cell: dict[int, int] = {}
    for cell_code, roles in by_signature.items():
        groups = (
            _groups(roles)
            if times[cell_code] >= LEAST_SHARE * times.sum()
            else [[role_index for _, role_index in roles]]
        )
        for group in groups:
            kind_of_cell.update({cell_code * width + role_index: len(kinds) for role_index in group})
            kinds.append((cell_code, tuple(group) if len(groups) > 1 else ()))
    of_cell = np.array([kind_of_cell[cell_code] for cell_code in cells.tolist()], dtype=np.int64)
    return of_cell[np.searchsorted(cells, cell)], kinds


def _groups(roles: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group roles by median time; roles close to the fastest of a group join it."""
    groups: list[list[int]] = []
    fastest = 0
    for median, role_index in sorted(roles):
        if not groups or median > APART * fastest:
            groups.append([])
            fastest = median
        groups[-1].append(role_index)
    return groups


CONFIG = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers", "shared_bytes")
"""Optional columns of `Trace.ops` that make up a signature together with the name."""

NEEDED = ("name", "mangled", *CONFIG)
"""Optional columns that `read_kernels` needs."""


@dataclass(frozen=True)
class Signature:
    """How a kernel was launched.

    Attributes:
        name: Its name with parameters and template arguments.
        grid, block: Blocks per grid, threads per block.
        registers: Registers per thread, -1 if unknown.
        shared_bytes: Static and dynamic shared memory per block, -1 if unknown.
        mangled: The mangled symbol name, '' if unknown.
        roles: The roles that this entry covers, if the signature does different work in different roles; else empty.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int = -1
    shared_bytes: int = -1
    mangled: str = ""
    roles: frozenset[Role] = frozenset()


@dataclass(frozen=True)
class Kernels:
    """The kernel launches of a capture; arrays have shape ``(k,)``, one element per launch.

    Attributes:
        signatures: The distinct signatures.
        signature: Index into `signatures`.
        invocation: Invocation number of its name, grid, block and shared memory in its process, from 1.
        early: Whether it is in or before the first captured step; True for all if there are no steps.
        duration: GPU time in ns.
        owners: The distinct (layer, phase) pairs of launches and other operations, by first start.
        owner: Index into `owners`.
        other_ns: Time of copies, memsets and whole-graph replays by owner, shape of `owners`; profilers collect no
            counters for them.
        parents: The parent of each layer, '' at the top.
    """

    signatures: tuple[Signature, ...]
    signature: npt.NDArray[np.intp]
    invocation: Int64Array
    early: npt.NDArray[np.bool_]
    duration: Int64Array
    owners: tuple[tuple[str, str], ...]
    owner: npt.NDArray[np.intp]
    other_ns: Int64Array
    parents: Mapping[str, str]

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


def read_kernels(trace: Trace, attribution: Attribution | None = None) -> Kernels:
    """The kernels of a capture by signature and owner.

    Args:
        trace: A capture with the optional columns `NEEDED`.
        attribution: The owner of each operation, if already known.

    Raises:
        CaptureError: The capture lacks the launch parameters of its kernels.
    """
    ops = trace.ops
    if any(name not in ops for name in NEEDED):
        raise CaptureError(
            f"{trace.info.path}: no launch configurations of kernels (grid, block, registers) in it; needed an "
            "nsys capture"
        )
    attribution = attribution or attribute(trace)
    owners, owner = _owners(attribution, ops["start_ns"].to_numpy())
    duration = (ops["end_ns"] - ops["start_ns"]).to_numpy()
    kernel = np.flatnonzero(ops["kind"].to_numpy() == OP_KINDS.index("kernel"))
    other = np.ones(len(ops), dtype=bool)
    other[kernel] = False
    other_ns = np.bincount(owner[other], weights=duration[other], minlength=len(owners)).astype(np.int64)
    columns = [ops[name].cat.codes.to_numpy()[kernel].astype(np.int64) for name in ("name", "mangled")]
    launches, index = distinct_rows(*columns, *(ops[name].to_numpy()[kernel] for name in CONFIG))
    signature = index.astype(np.intp)
    names, mangled = (ops[name].cat.categories for name in ("name", "mangled"))
    signatures = tuple(
        Signature(names[name], tuple(config[:3]), tuple(config[3:6]), config[6], config[7], mangled[linker])
        for name, linker, *config in zip(*(column.tolist() for column in launches), strict=True)
    )
    pid, call, start = (ops[name].to_numpy()[kernel] for name in ("pid", "correlation", "start_ns"))
    launched = np.lexsort((start, call, pid))
    invocation = _numbered(launched, signature, pid) + 1
    layer, step = attribution.layer_range[kernel], attribution.step[kernel]
    # in a layer's call, where all replays of a graph share the range of its capture
    replay = np.where(ops["graph_node"].to_numpy()[kernel] >= 0, call, -1)
    number = _numbered(launched, signature, layer, replay)
    position = np.where(layer == NONE, 0, np.minimum(number, PLACES - 1))
    early = np.ones(len(kernel), dtype=bool)
    if (step != NONE).any():
        last_of_first_step = np.flatnonzero(step[launched] == step[step != NONE].min()).max()
        early[launched[last_of_first_step + 1 :]] = False
    role_of_owner = [role_of(layer_and_phase) for layer_and_phase in owners]
    roles = list(dict.fromkeys(role_of_owner))
    role = np.array([roles.index(name) for name in role_of_owner], dtype=np.int64)[owner[kernel]]
    signatures, signature = _divided(signatures, signature, duration[kernel], (roles, role), position)
    return Kernels(
        signatures=signatures,
        signature=signature,
        invocation=invocation,
        early=early,
        duration=duration[kernel],
        owners=owners,
        owner=owner[kernel],
        other_ns=other_ns,
        parents=layer_parents(attribution.ranges),
    )


def _numbered(order: npt.NDArray[np.intp], *keys: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Each element's number, from 0, among the elements with equal keys, in the given order."""
    import pandas as pd

    _, group = distinct_rows(*(key.astype(np.int64, copy=False) for key in keys))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = pd.Series(order).groupby(group[order], sort=False).cumcount().to_numpy()
    return number


def _divided(
    signatures: tuple[Signature, ...],
    signature: npt.NDArray[np.intp],
    duration: Int64Array,
    roles: tuple[list[Role], Int64Array],
    position: Int64Array,
) -> tuple[tuple[Signature, ...], npt.NDArray[np.intp]]:
    """Divide signatures by role and position if the same signature does different work."""
    names, role = roles
    index, kinds = divide_by_role(signature.astype(np.int64), role * PLACES + position, duration)
    divided = (
        replace(signatures[kind_index], roles=frozenset(names[both // PLACES] for both in these))
        if these
        else signatures[kind_index]
        for kind_index, these in kinds
    )
    return tuple(divided), index.astype(np.intp)


def _owners(attribution: Attribution, start: Int64Array) -> tuple[tuple[tuple[str, str], ...], npt.NDArray[np.intp]]:
    """The distinct (layer, phase) pairs by first start, and the index of each operation into them."""
    name = np.append(attribution.ranges.name, NONE)[attribution.layer_range]
    codes, index = distinct(name.astype(np.int64) * len(attribution.phases) + attribution.phase)
    first = np.full(len(codes), np.iinfo(np.int64).max)
    np.minimum.at(first, index, start)
    layers, phases = (numbers.tolist() for numbers in np.divmod(codes, len(attribution.phases)))
    pairs = [
        (NO_LAYER if layer == NONE else attribution.ranges.names[layer].text, attribution.phases[phase])
        for layer, phase in zip(layers, phases, strict=True)
    ]
    by_start = dict.fromkeys(pairs[owner_index] for owner_index in np.argsort(first, kind="stable").tolist())
    number = {pair: owner_index for owner_index, pair in enumerate(by_start)}
    return tuple(number), np.array([number[pair] for pair in pairs], dtype=np.intp)[index]
