"""The metrics of every set exist on the chips of its architecture, by the names that ncu 2025.3.1 lists.

`tests/integration/recipes/test_recipes_ncu.py` asks an installed ncu; those that install without a GPU know no
Blackwell.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LISTED = ROOT / "tests" / "data" / "ncu" / "metrics-2025.3.1.txt.xz"
CHIPS = {
    "sm_80": ("ga100", "ga102"),
    "sm_89": ("ad102", "ad104"),
    "sm_90": ("gh100",),
    "sm_100": ("gb100", "gb102"),
    "sm_120": ("gb202", "gb203", "gb205", "gb206", "gb207"),
}


@pytest.fixture(scope="module")
def chips_with() -> dict[str, frozenset[str]]:
    """The chips that have a metric, by its name."""
    lines = lzma.decompress(LISTED.read_bytes()).decode().splitlines()
    return {name: frozenset(chips) for name, *chips in map(str.split, lines)}


@pytest.mark.parametrize("arch", CHIPS)
def test_every_metric_exists_on_every_chip(arch: str, chips_with: dict[str, frozenset[str]]) -> None:
    lacking = []
    for path in sorted((ROOT / "recipes" / "ncu" / "sets").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            kind, name, *only = line.split() if line.strip() else ["#", ""]
            if kind != "metric" or name.startswith("launch__") or (only and arch not in only):
                continue  # metrics of the launch are not counted, so ncu does not list them
            there = chips_with.get(name, frozenset()) | chips_with.get(name.split(".")[0], frozenset())
            lacking += [f"{path.name}: {name} on {chip}" for chip in CHIPS[arch] if chip not in there]
    assert lacking == []


def test_what_moves_through_dram_is_asked_of_every_architecture() -> None:
    lines = (ROOT / "recipes" / "ncu" / "sets" / "memory.txt").read_text(encoding="utf-8").splitlines()
    told = [line.split() for line in lines if line.startswith("metric dram__bytes")]
    for arch in CHIPS:
        assert sum(not only or arch in only for _, _, *only in told) == 2, arch
