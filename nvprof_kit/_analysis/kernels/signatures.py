"""The kernels of a capture by signature: what is launched in the same way costs the same, so one measured launch
stands for all of its kind.

A signature is the kernel's name, its grid, its block, and what a thread and a block take: registers and shared memory.
That is not always enough: a matrix product that runs over a longer inner dimension is launched in the same way and
takes longer. So a signature is divided by *role*, which is the layer without its number and the phase, wherever the
times of its roles are apart, and by the launch's place in its layer's call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.layers.order import layer_parents
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER

Role = tuple[str, str]
"""Layer, with ``*`` for every number in its path, and phase."""

Ints = npt.NDArray[np.int64]

PLACES = 64
"""Places that are told apart; further launches of a signature in one call of a layer count as the last of these."""

APART = 1.2
"""Roles are apart where one's median time is longer than another's by this factor."""

LEAST_SHARE = 0.001
"""Signatures of a smaller share of the GPU time are not divided: their times are too short to tell."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def role_of(owner: tuple[str, str]) -> Role:
    """The role of a layer and phase: ``("layers.3.mlp", "forward")`` gives ``("layers.*.mlp", "forward")``."""
    return _NUMBER.sub("*", owner[0]), owner[1]


def divide_by_role(signature: Ints, role: Ints, duration: Ints) -> tuple[Ints, list[tuple[int, tuple[int, ...]]]]:
    """Divide signatures whose roles, or roles and places, are apart.

    Args:
        signature: Which signature each launch has, shape ``(k,)``.
        role: Which role each launch has, ``(k,)``.
        duration: Time of each launch, ``(k,)``.

    Returns:
        Of each launch its kind, shape ``(k,)``; and of each kind its signature, and its roles where the signature was
        divided, none where it was not.
    """
    width = int(role.max(initial=0)) + 1
    cell = signature * width + role
    order = np.lexsort((duration, cell))
    cells, first, counts = np.unique(cell[order], return_index=True, return_counts=True)
    medians = duration[order][first + counts // 2]
    times = np.bincount(signature, weights=duration)
    by_signature: dict[int, list[tuple[int, int]]] = {}
    for one, median in zip(cells.tolist(), medians.tolist(), strict=True):
        by_signature.setdefault(one // width, []).append((median, one % width))
    kinds: list[tuple[int, tuple[int, ...]]] = []
    kind_of_cell: dict[int, int] = {}
    for one, roles in by_signature.items():
        groups = _groups(roles) if times[one] >= LEAST_SHARE * times.sum() else [[place for _, place in roles]]
        for group in groups:
            kind_of_cell.update({one * width + place: len(kinds) for place in group})
            kinds.append((one, tuple(group) if len(groups) > 1 else ()))
    of_cell = np.array([kind_of_cell[one] for one in cells.tolist()], dtype=np.int64)
    return of_cell[np.searchsorted(cells, cell)], kinds


def _groups(roles: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Roles by their median times, those that are not apart from the quickest of a group together."""
    groups: list[list[int]] = []
    least = 0
    for median, place in sorted(roles):
        if not groups or median > APART * least:
            groups.append([])
            least = median
        groups[-1].append(place)
    return groups


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
        roles: Where the same launch does different work in different roles: those this one is for; else empty.
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
    """The kernel launches of a capture; arrays have the shape ``(k,)``, an element for each launch.

    Attributes:
        signatures: The distinct signatures.
        signature: Index into `signatures`.
        invocation: Which instance of its name, grid, block and shared memory it is in its process, from 1.
        early: Whether it is of the first captured step, or before; all are where there are no steps.
        duration: Time on the GPU in ns.
        owners: The distinct (layer, phase) pairs that launches and other operations belong to, by their first start.
        owner: Index into `owners`.
        other_ns: Time of copies, memsets and whole-graph replays by owner, shape of `owners`: no profiler counts for
            them.
        parents: The layer that holds each layer, '' at the top.
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
        attribution: Who owns each operation, where that is known already.

    Raises:
        CaptureError: The capture does not say how its kernels were launched.
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
    signatures, signature = _signatures(trace, kernel)
    launched = _launched(trace, kernel)
    invocation = _numbered(launched, signature, ops["pid"].to_numpy()[kernel]) + 1
    place = _places(trace, attribution, kernel, launched, signature)
    signatures, signature = _divided(signatures, signature, duration[kernel], _roles(owners, owner[kernel]), place)
    return Kernels(
        signatures=signatures,
        signature=signature,
        invocation=invocation,
        early=_early(launched, attribution.step[kernel]),
        duration=duration[kernel],
        owners=owners,
        owner=owner[kernel],
        other_ns=other_ns,
        parents=layer_parents(attribution.ranges),
    )


def _launched(trace: Trace, kernel: Int64Array) -> npt.NDArray[np.intp]:
    """The kernels in the order in which they were launched."""
    pid, call, start = (trace.ops[name].to_numpy()[kernel] for name in ("pid", "correlation", "start_ns"))
    return np.lexsort((start, call, pid))


def _numbered(order: npt.NDArray[np.intp], *keys: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Each element's number, from 0, among those with equal keys, in some order."""
    group = np.zeros(len(order), dtype=np.int64)
    for key in keys:
        distinct, code = np.unique(key, return_inverse=True)
        _, group = np.unique(group * max(len(distinct), 1) + code, return_inverse=True)
    together = np.argsort(group[order], kind="stable")
    _, first, counts = np.unique(group[order][together], return_index=True, return_counts=True)
    number = np.empty(len(order), dtype=np.int64)
    number[order[together]] = np.arange(len(order)) - np.repeat(first, counts)
    return number


def _places(
    trace: Trace,
    attribution: Attribution,
    kernel: Int64Array,
    launched: npt.NDArray[np.intp],
    signature: npt.NDArray[np.intp],
) -> Int64Array:
    """Which instance of its signature each launch is in its call of the layer; 0 outside layers."""
    layer = attribution.layer_range[kernel]
    node, call = (trace.ops[name].to_numpy()[kernel] for name in ("graph_node", "correlation"))
    replay = np.where(node >= 0, call, -1)  # replays of a graph share the range in which it was captured
    number = _numbered(launched, signature, layer, replay)
    return np.where(layer == NONE, 0, np.minimum(number, PLACES - 1))


def _early(launched: npt.NDArray[np.intp], step: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which launches are of the first step, or before its end."""
    early = np.ones(len(step), dtype=bool)
    if (step != NONE).any():
        last = np.flatnonzero(step[launched] == step[step != NONE].min()).max()
        early[launched[last + 1 :]] = False
    return early


def _roles(owners: tuple[tuple[str, str], ...], owner: npt.NDArray[np.intp]) -> tuple[list[Role], Int64Array]:
    """The distinct roles, and which of them each launch has."""
    of_owner = [role_of(one) for one in owners]
    place = {role: number for number, role in enumerate(dict.fromkeys(of_owner))}
    return list(place), np.array([place[one] for one in of_owner], dtype=np.int64)[owner]


def _divided(
    signatures: tuple[Signature, ...],
    signature: npt.NDArray[np.intp],
    duration: Int64Array,
    roles: tuple[list[Role], Int64Array],
    place: Int64Array,
) -> tuple[tuple[Signature, ...], npt.NDArray[np.intp]]:
    """Signatures divided by role and place where the same launch does different work."""
    names, role = roles
    index, kinds = divide_by_role(signature.astype(np.int64), role * PLACES + place, duration)
    divided = (
        replace(signatures[one], roles=frozenset(names[both // PLACES] for both in these)) if these else signatures[one]
        for one, these in kinds
    )
    return tuple(divided), index.astype(np.intp)


def _owners(attribution: Attribution, start: Int64Array) -> tuple[tuple[tuple[str, str], ...], npt.NDArray[np.intp]]:
    """The distinct (layer, phase) pairs by their first start, and which of them each operation belongs to."""
    name = np.append(attribution.ranges.name, NONE)[attribution.layer_range]
    codes, index = np.unique(name.astype(np.int64) * len(attribution.phases) + attribution.phase, return_inverse=True)
    first = np.full(len(codes), np.iinfo(np.int64).max)
    np.minimum.at(first, index, start)
    layers, phases = (part.tolist() for part in np.divmod(codes, len(attribution.phases)))
    pairs = [
        (NO_LAYER if layer == NONE else attribution.ranges.names[layer].text, attribution.phases[phase])
        for layer, phase in zip(layers, phases, strict=True)
    ]
    by_start = dict.fromkeys(pairs[place] for place in np.argsort(first, kind="stable").tolist())
    number = {pair: place for place, pair in enumerate(by_start)}
    return tuple(number), np.array([number[pair] for pair in pairs], dtype=np.intp)[index]


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
