"""Which measured launch stands for which kernels of a capture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvprof_kit.analysis.kernels import Signature
from nvprof_kit.analysis.ncu_plan import size_text
from nvprof_kit.trace.ncu_schema import NcuReport

if TYPE_CHECKING:
    import pandas as pd

_REGISTERS = "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
_SPACES = re.compile(r"\s+")
_NAMESPACES = re.compile(r"(?:\w+|<unnamed>)::")
_CASTS = re.compile(r"\((?:unsigned )?(?:bool|char|short|int|long|long long)\)(?=-?\d)")


def measured_signatures(report: NcuReport, signatures: Sequence[Signature]) -> list[list[int]]:
    """The results of a report that were launched as each signature says.

    Name, grid and block must be the same; of several such signatures that differ only in registers or shared memory, a
    result stands for those it agrees with.

    Returns:
        For each signature the places of its results, none where it was not measured.
    """
    by_launch: dict[tuple[str, str, str], list[int]] = {}
    for place, launch in enumerate(zip(*(report.kernels[name] for name in ("kernel", "grid", "block")), strict=True)):
        by_launch.setdefault((_plain(launch[0]), launch[1], launch[2]), []).append(place)
    taken = _taken(report.metrics)
    found = []
    for one in signatures:
        places = by_launch.get((_plain(one.name), size_text(one.grid), size_text(one.block)), [])
        exact = [place for place in places if taken[place] == (one.registers, one.shared_bytes)]
        found.append(exact or places)
    return found


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
