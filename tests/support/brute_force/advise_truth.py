"""Captures with known faults, and the precision and recall of each rule of `advise` on them."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nvprof_kit
from support.captures.advise_programs import FAULTS, LOOKALIKES, Program
from support.data import DATA

REAL = {
    capture: (faults, absent)
    for line in (DATA / "faults" / "known.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for capture, faults, absent in [line.split("\t")]
}
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
