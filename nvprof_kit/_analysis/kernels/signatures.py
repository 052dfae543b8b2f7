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
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Attribution, attribute
from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array
from nvprof_kit._analysis.layers.tree import layer_parents
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.errors import CaptureError

if TYPE_CHECKING:
    import pandas as pd

Owner = tuple[str, str]
"""Layer and phase."""

Role = tuple[str, str]
"""Layer, with ``*`` for every number in its path, and phase."""

PLACES = 64
"""Maximum number of positions; further launches of a signature in one layer call count as the last position."""

APART = 1.2
"""Roles differ if their median times differ by this factor."""

LEAST_SHARE = 0.001
"""Signatures with a smaller share of the GPU time are not divided: their times are too short to compare."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def role_of(owner: Owner) -> Role:
    """The role of a layer and phase: ``("layers.3.mlp", "forward")`` gives ``("layers.*.mlp", "forward")``."""
    return _NUMBER.sub("*", owner[0]), owner[1]


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
    """The kernel launches of a capture.

    Attributes:
        signatures: The distinct signatures.
        launches: A row per launch, in table order: ``signature`` and ``owner``, indices into these tuples; ``ns``;
            ``invocation``, the number of the launch of its name, grid, block and shared memory in its process, from 1;
            ``is_early``, whether it is in or before the first captured step, True if there are no steps.
        owners: The distinct (layer, phase) pairs of launches and other operations, by first start.
        other_ns: Time of copies, memsets and whole-graph replays by owner, shape of `owners`; profilers collect no
            counters for them.
        parents: The parent of each layer, '' at the top.
    """

    signatures: tuple[Signature, ...]
    launches: pd.DataFrame
    owners: tuple[Owner, ...]
    other_ns: Int64Array
    parents: Mapping[str, str]

    def by_owner(self) -> pd.DataFrame:
        """Time in ns and number of ``launches`` by ``owner`` and ``signature``."""
        groups = self.launches.groupby(["owner", "signature"], as_index=False)
        return groups.agg(ns=("ns", "sum"), launches=("ns", "size"))


def read_kernels(trace: Trace, attribution: Attribution | None = None) -> Kernels:
    """The kernels of a capture by signature and owner.

    Args:
        trace: A capture with the optional columns `NEEDED`.
        attribution: The owner of each operation, if already known.

    Raises:
        CaptureError: The capture lacks the launch parameters of its kernels.
    """
    if any(name not in trace.ops for name in NEEDED):
        raise CaptureError.of("no-launch-configurations", path=trace.info.path)
    attribution = attribution or attribute(trace)
    layer, phase = attribution.owners
    ops = trace.ops.assign(layer=layer, phase=phase, ns=trace.ops["end_ns"] - trace.ops["start_ns"])
    of_owner = ops.groupby(["layer", "phase"], observed=True, sort=False)
    first_ns = of_owner["start_ns"].min()
    by_start = np.argsort(first_ns.to_numpy(), kind="stable")
    owners = tuple(first_ns.index[by_start])
    ops["owner"] = np.argsort(by_start)[of_owner.ngroup()]
    is_kernel = ops["kind"] == OP_KINDS.index("kernel")
    other_ns = ops[~is_kernel].groupby("owner")["ns"].sum().reindex(range(len(owners)), fill_value=0).to_numpy()

    launches = ops[is_kernel].assign(step=attribution.step[is_kernel], range=attribution.layer_range[is_kernel])
    launches = launches.sort_values(["pid", "correlation", "start_ns"], kind="stable")
    of_signature = launches.groupby([*NEEDED], observed=True)
    launches["signature"] = of_signature.ngroup()
    signatures = [
        Signature(name, tuple(config[:3]), tuple(config[3:6]), config[6], config[7], mangled)
        for name, mangled, *config in of_signature.size().index
    ]
    launches["invocation"] = launches.groupby(["signature", "pid"]).cumcount() + 1
    # in a layer's call, where all replays of a graph share the range of its capture
    launches["replay"] = launches["correlation"].where(launches["graph_node"] >= 0, NONE)
    position = launches.groupby(["signature", "range", "replay"]).cumcount().clip(upper=PLACES - 1)
    launches["position"] = position.where(launches["range"] != NONE, 0)
    step, in_step = launches["step"].to_numpy(), (launches["step"] != NONE).to_numpy()
    last_of_first = np.flatnonzero(step == step[in_step].min()).max() if in_step.any() else len(step)
    launches["is_early"] = np.arange(len(step)) <= last_of_first
    roles = list(dict.fromkeys(map(role_of, owners)))
    role_number = np.array([roles.index(role_of(owner)) for owner in owners], dtype=np.int64)
    launches["role"] = role_number[launches["owner"]]
    divided, launches["signature"] = _divided(signatures, launches, roles)
    columns = ["signature", "owner", "ns", "invocation", "is_early"]
    return Kernels(divided, launches[columns].sort_index(), owners, other_ns, layer_parents(attribution.ranges))


def _divided(
    signatures: Sequence[Signature], launches: pd.DataFrame, roles: Sequence[Role]
) -> tuple[tuple[Signature, ...], Int64Array]:
    """Divide signatures if the times of their roles, or of their roles and positions, differ.

    Args:
        signatures: The signatures.
        launches: Columns ``signature``, ``role``, ``position``, ``ns``.
        roles: The roles.

    Returns:
        The signatures, with the roles of those that were divided, and the signature of each launch.
    """
    cells = launches.groupby(["signature", "role", "position"])
    medians = cells["ns"].quantile(0.5, interpolation="higher").rename("median").reset_index()
    times = launches.groupby("signature")["ns"].sum()
    medians["is_notable"] = (times >= LEAST_SHARE * times.sum())[medians["signature"]].to_numpy()
    medians = medians.sort_values(["signature", "median", "role", "position"])
    group_of_cell = np.empty(len(medians), dtype=np.int64)
    divided: list[Signature] = []
    for signature, rows in medians.groupby("signature"):
        groups: list[list[int]] = []
        fastest = 0
        for cell, median, is_notable in zip(rows.index, rows["median"], rows["is_notable"], strict=True):
            if not groups or (is_notable and median > APART * fastest):
                groups.append([])
                fastest = median
            groups[-1].append(cell)
        for group in groups:
            group_of_cell[group] = len(divided)
            names = frozenset(roles[role] for role in rows.loc[group, "role"]) if len(groups) > 1 else frozenset()
            divided.append(replace(signatures[int(str(signature))], roles=names))
    return tuple(divided), group_of_cell[cells.ngroup()]
