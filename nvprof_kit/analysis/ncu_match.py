"""Which measured launch stands for which kernels of a capture."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nvprof_kit.analysis.kernel_roles import role_of
from nvprof_kit.analysis.kernels import Kernels, Signature
from nvprof_kit.analysis.ncu_owners import own_layers
from nvprof_kit.analysis.ncu_plan import size_text
from nvprof_kit.trace.ncu_schema import NcuReport

if TYPE_CHECKING:
    import pandas as pd

_REGISTERS = "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
_SPACES = re.compile(r"\s+")
_NAMESPACES = re.compile(r"(?:\w+|<unnamed>)::")
_CASTS = re.compile(r"\((?:unsigned )?(?:bool|char|short|int|long|long long)\)(?=-?\d)")


def measured_signatures(report: NcuReport, kernels: Kernels) -> list[list[int]]:
    """The results of a report that were launched as each signature of a capture says.

    Name, grid and block must be the same; of several such signatures that differ only in registers or shared memory, a
    result stands for those it agrees with. Where a launch does different work in different roles, the number of the
    launch tells which it was, if the report says which it has or has all of a step; else the ranges around it tell its
    role; and a report without either stands for all.

    Returns:
        For each signature the places of its results, none where it was not measured.
    """
    by_launch: dict[tuple[str, str, str], list[int]] = {}
    for place, launch in enumerate(zip(*(report.kernels[name] for name in ("kernel", "grid", "block")), strict=True)):
        by_launch.setdefault((_plain(launch[0]), launch[1], launch[2]), []).append(place)
    taken = _taken(report.metrics)
    roles = [role_of(owner) for owner in own_layers(report.kernels).owners] if any(report.kernels["stack"]) else None
    found: list[list[int]] = []
    divided: dict[Signature, tuple[list[int], list[int]]] = {}
    for kind, one in enumerate(kernels.signatures):
        places = by_launch.get((_plain(one.name), size_text(one.grid), size_text(one.block)), [])
        places = [place for place in places if taken[place] == (one.registers, one.shared_bytes)] or places
        if one.roles:
            divided.setdefault(replace(one, roles=frozenset()), (places, []))[1].append(kind)
        found.append([place for place in places if not (one.roles and roles) or roles[place] in one.roles])
    for places, kinds in divided.values():
        for kind, its in _by_number(report, kernels, places, kinds).items():
            found[kind] = its
    return found


def _by_number(report: NcuReport, kernels: Kernels, places: list[int], kinds: list[int]) -> dict[int, list[int]]:
    """The results of one launch by the kinds of work it does, nothing where the numbers of the launches are not known.

    The results are in the order of launching. ncu took all launches of a step, or those of the numbers the report has.
    """
    mine = kernels.early & np.isin(kernels.signature, kinds)
    kind_of = dict(zip(kernels.invocation[mine].tolist(), kernels.signature[mine].tolist(), strict=True))
    planned = [number for number in sorted(report.invocations) if number in kind_of]
    numbers = next((known for known in (planned, sorted(kind_of)) if known and len(known) == len(places)), [])
    if not numbers:
        return {}
    measured = list(zip(places, numbers, strict=True))
    return {kind: [place for place, number in measured if kind_of[number] == kind] for kind in kinds}


def _plain(name: str) -> str:
    """A kernel's name as nsys and ncu both could write it: without namespaces and types of template arguments.

    Where it prints a report, ncu leaves out some of these (``--rename-kernels``, on since 2024.2).
    """
    plain = _SPACES.sub(" ", name).replace("(anonymous namespace)", "<unnamed>").strip()
    return _NAMESPACES.sub("", _CASTS.sub("", plain))


def _taken(metrics: pd.DataFrame) -> list[tuple[int, int]]:
    """Registers of a thread and shared memory of a block of each result, -1 where the report does not say."""
    registers = metrics[_REGISTERS].fillna(-1).tolist() if _REGISTERS in metrics else [-1] * len(metrics)
    shared = (
        (metrics[_SHARED[0]] + metrics[_SHARED[1]]).fillna(-1).tolist()
        if all(name in metrics for name in _SHARED)
        else [-1] * len(metrics)
    )
    return [(int(one), int(other)) for one, other in zip(registers, shared, strict=True)]
