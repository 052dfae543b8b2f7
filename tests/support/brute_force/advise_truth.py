"""Captures with known faults, and the precision and recall of each rule of `advise` on them."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import nvprof_kit
from support.captures.advise_programs import FAULTS, LOOKALIKES, Program
from support.data import DATA

_SLOW = (
    "fp32-gemms dataloader allocation outlier-layer copies small-kernels",
    "recompute exposed-collectives rank-wait gc",
)
_REPLAYS = ("unfused-chains", "launch sync dataloader allocation loading recompute exposed-collectives rank-wait gc")
_ALONE = "exposed-collectives rank-wait"
_EAGER = ("launch unfused-chains", f"recompute loading allocation dataloader fp32-gemms outlier-layer {_ALONE}")
_RANKS = "recompute fp32-gemms gc small-kernels copies"
_STEADY = f"launch sync dataloader allocation loading recompute fp32-gemms outlier-layer small-kernels copies {_ALONE}"
REAL: Mapping[str, tuple[str, str]] = {
    "slow-2024.2": _SLOW,
    "garbage-2024.2": ("gc", f"unstable-step {_STEADY}"),
    "garbage-hidden-2024.2": ("", f"gc unstable-step {_STEADY}"),
    "lengths-2024.2": ("unstable-step", f"gc {_STEADY}"),
    "lengths-even-2024.2": ("", f"gc unstable-step {_STEADY}"),
    "slow-cpu-2024.2": _SLOW,
    "slow-operators-2024.2": _SLOW,
    "generate-2024.2": (
        "loading launch", f"unstable-step small-kernels recompute dataloader outlier-layer gc {_ALONE}"
    ),
    "graph-2023.4": _REPLAYS,
    "graph-2024.2": _REPLAYS,
    "eager-2023.4": _EAGER,
    "eager-2024.2": _EAGER,
    "checkpoint-2023.4": ("recompute launch", f"loading allocation fp32-gemms outlier-layer {_ALONE}"),
    "checkpoint-inside-2024.2": ("recompute launch", f"loading allocation fp32-gemms outlier-layer {_ALONE}"),
    "checkpoint-reentrant-2023.4": ("recompute launch", f"loading allocation fp32-gemms outlier-layer {_ALONE}"),
    "compile-blocks-parts-2024.2": ("sync", f"recompute dataloader fp32-gemms gc {_ALONE}"),
    "memory/uncached-2024.2": ("allocation launch", f"recompute loading fp32-gemms outlier-layer {_ALONE}"),
    "fsdp.rank0-2024.2": ("launch exposed-collectives", "recompute loading allocation fp32-gemms outlier-layer"),
    "pipeline.rank0-2024.2": ("rank-wait", "recompute loading allocation fp32-gemms exposed-collectives"),
    "hooks-ddp-2024.2": ("exposed-collectives", "recompute unstable-step"),
    "ddp.rank0-2024.2": ("launch", "recompute dataloader exposed-collectives unstable-step"),
    "graph-whole-2024.2": ("", "launch sync small-kernels unfused-chains"),
    "metrics/llama-2023.4": ("gpu-metrics launch", "recompute fp32-gemms"),
    "ranks/ddp-layer.rank0-2024.2": ("", f"outlier-layer dataloader loading {_RANKS}"),
    "ranks/ddp-layer.rank1-2024.2": ("outlier-layer", f"dataloader loading {_RANKS}"),
    "ranks/ddp-host.rank1-2024.2": ("launch", f"outlier-layer dataloader {_RANKS}"),
    "ranks/ddp-loader.rank0-2024.2": ("", f"outlier-layer dataloader {_RANKS}"),
    "ranks/ddp-loader.rank1-2024.2": ("dataloader", f"outlier-layer {_RANKS}"),
    "ranks/ddp-none.rank0-2024.2": ("", f"outlier-layer dataloader {_RANKS}"),
    "ranks/ddp-none.rank1-2024.2": ("", f"outlier-layer dataloader {_RANKS}"),
    "ranks/fsdp-layer.rank1-2024.2": ("outlier-layer", f"dataloader loading {_RANKS}"),
    "ranks/fsdp-layer.rank0-2024.2": ("", f"outlier-layer dataloader loading {_RANKS}"),
    "ranks/tensor-layer.rank1-2024.2": ("outlier-layer", f"dataloader loading {_RANKS}"),
    "ranks/tensor-host.rank1-2024.2": ("launch", f"outlier-layer dataloader {_RANKS}"),
    "ranks/tensor-loader.rank1-2024.2": ("dataloader", f"outlier-layer {_RANKS}"),
    "ranks/tensor-none.rank0-2024.2": ("", f"outlier-layer dataloader {_RANKS}"),
}  # fmt: skip
"""Committed captures: rules of which the program is known to have the fault, and of which it is known to have not."""


class Judged(NamedTuple):
    """Result of one capture: faults found, faults missed, and findings without a fault."""

    name: str
    right: frozenset[str]
    missed: frozenset[str]
    wrong: frozenset[str]


def real() -> Iterator[Judged]:
    """The committed captures."""
    for name, (faults, absent) in REAL.items():
        found = rules_of(DATA / f"{name}.sqlite.xz")
        has = frozenset(faults.split())
        yield Judged(name, has & found, has - found, found & frozenset(absent.split()))


def made_up(folder: Path, seeds: range) -> Iterator[Judged]:
    """Random programs with up to two faults each, and some lookalikes; every other finding is wrong."""
    for seed in seeds:
        draw = random.Random(seed)
        faults = draw.sample(FAULTS, draw.choice((0, 1, 1, 2)))
        alike = draw.sample(LOOKALIKES, draw.choice((0, 1, 2)))
        found = rules_of(Program(folder / f"{seed}.sqlite", seed, (*faults, *alike)).write())
        has = frozenset(faults)
        yield Judged(f"{seed}: {', '.join((*faults, *alike))}", has & found, has - found, found - has)


def rules_of(path: Path) -> frozenset[str]:
    """The rules with a finding."""
    return frozenset(one.rule for one in nvprof_kit.open(path).advise().findings)


def by_rule(judged: list[Judged]) -> dict[str, tuple[int, int, int]]:
    """Right, missed and wrong findings of each rule."""
    parts = zip(*(one[1:] for one in judged), strict=True)
    right, missed, wrong = (Counter(rule for found in part for rule in found) for part in parts)
    return {rule: (right[rule], missed[rule], wrong[rule]) for rule in sorted({*right, *missed, *wrong})}
