"""How well the order of kernels alone shows the layers that a capture's own ranges name.

Independent of the analysis: a capture is copied without its NVTX ranges, both are opened through the public API, and
the owners of the same operations are compared.
"""

import re
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import nvprof_kit
from support.data import unpacked

LOOKED_AT = (
    "checkpoint-2023.4",
    "compile-blocks-2024.2",
    "ddp.rank0-2024.2",
    "eager-2024.2",
    "encoder-2023.4",
    "fsdp-keep.rank0-2024.2",
    "graph-2024.2",
    "hooks-ddp-2024.2",
    "compile-model-parts-2024.2",
    "llama-2023.4",
)
"""Captures in `DATA` that the rules of structure may be written by. Every second of those with known layers."""

KEPT_APART = (
    "checkpoint-reentrant-2023.4",
    "compile-blocks-parts-2024.2",
    "eager-2023.4",
    "fsdp.rank0-2024.2",
    "generate-2024.2",
    "gpt2-2023.4",
    "graph-2023.4",
    "hooks-train-2023.4",
    "inductor-graphs-2024.2",
    "tensor.rank0-2024.2",
    "tensor.rank1-2024.2",
)
"""Captures that are only judged by, as are all in ``structure/``."""

WITHOUT_BLOCKS = ("random-ops", "short")
"""Programs in ``structure/`` in which no blocks may be found: kernels without an order, a model of one layer."""

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)(?:\.|$)")
_DIRECTION = {"forward": "forward", "backward": "backward", "recompute": "backward"}


@dataclass(frozen=True)
class Agreement:
    """Blocks by ranges and by structure.

    Attributes:
        true, found: Number of blocks.
        share: Share of the blocks' kernel time that structure gives to the same block and direction.
        outside: Time that structure gives to blocks and ranges do not, as a share of the blocks' time.
    """

    true: int
    found: int
    share: float
    outside: float


def without_ranges(capture: Path, folder: Path) -> Path:
    """A copy of a packed nsys capture without NVTX events."""
    copy = unpacked(capture, folder / capture.name.removesuffix(".xz"))
    with sqlite3.connect(copy) as db:
        db.execute("DROP TABLE IF EXISTS NVTX_EVENTS")
    return copy


def _owners(capture: Path) -> list[tuple[int, tuple[str, int, str] | None]]:
    """Duration and block of each kernel: what is before the layer's number, the number, and the direction."""
    table = nvprof_kit.open(capture).tables["operations"]
    table = table[table["kind"] == 0].sort_values(["start_ns", "end_ns", "stream", "correlation"])
    owners = []
    for row in table[["start_ns", "end_ns", "layer", "phase"]].itertuples(index=False):
        named = _LAYER.match(str(row.layer))
        direction = _DIRECTION.get(str(row.phase))
        owners.append(
            (row.end_ns - row.start_ns, (named[1], int(named[2]), direction) if named and direction else None)
        )
    return owners


def compare(capture: Path, folder: Path) -> Agreement:
    """Compare structure with the ranges of one capture."""
    both = list(zip(_owners(capture), _owners(without_ranges(capture, folder)), strict=True))
    overlap: dict[tuple[str, int], dict[tuple[str, int], int]] = defaultdict(lambda: defaultdict(int))
    for (duration, true), (_, found) in both:
        if true and found:
            overlap[true[:2]][found[:2]] += duration
    partner: dict[tuple[str, int], tuple[str, int]] = {}
    for true_block in sorted(overlap, key=lambda block: -max(overlap[block].values())):
        free = [block for block in overlap[true_block] if block not in partner.values()]
        if free:
            partner[true_block] = max(free, key=overlap[true_block].__getitem__)
    total = sum(duration for (duration, true), _ in both if true)
    own = sum(
        duration
        for (duration, true), (_, found) in both
        if true and found and partner.get(true[:2]) == found[:2] and true[2] == found[2]
    )
    outside = sum(duration for (duration, true), (_, found) in both if found and not true)
    return Agreement(
        true=len({true[:2] for (_, true), _ in both if true}),
        found=len({found[:2] for _, (_, found) in both if found}),
        share=own / max(total, 1),
        outside=outside / max(total, 1),
    )
