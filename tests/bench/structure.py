"""Prints how well the order of kernels shows the layers of annotated captures: the table of ``docs/structure.md``.

``python tests/bench/structure.py`` takes the captures in ``tests/data``; with a FOLDER, every ``.sqlite.xz`` in it, of
which every second in alphabetical order is kept apart.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from support.structure_truth import DATA, KEPT_APART, LOOKED_AT, compare  # noqa: E402


def _captures(folders: list[str]) -> list[tuple[str, Path]]:
    if not folders:
        sets = (("looked at", LOOKED_AT), ("kept apart", KEPT_APART))
        return [(kind, DATA / f"{name}.sqlite.xz") for kind, names in sets for name in names]
    paths = [path for folder in folders for path in Path(folder).glob("*.sqlite.xz")]
    found = sorted(paths, key=lambda path: path.name.split(".")[0])
    return [("looked at", path) for path in found[0::2]] + [("kept apart", path) for path in found[1::2]]


if __name__ == "__main__":
    print("| capture | set | blocks found / true | kernel time in its own block | outside |\n|---|---|---:|---:|---:|")
    for kind, capture in _captures(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            result = compare(capture, Path(folder))
        share = f"{100 * result.share:.1f} %" if result.true else ""
        name, outside = capture.name.split(".sqlite")[0], f"{100 * result.outside:.1f} %"
        print(f"| {name} | {kind} | {result.found} / {result.true} | {share} | {outside} |", flush=True)
