"""Prints how well the order of kernels shows the layers of annotated captures: the table of ``docs/structure.md``.

``python tests/bench/structure.py`` takes the captures in ``tests/data``; with a FOLDER, every ``.sqlite.xz`` in it, of
which every second in alphabetical order is kept apart. ``--kernels 1000000`` prints the processor time of ``layers`` of
so many kernels instead, with ranges and without.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from bench.bench_reading import amplify, of_repository, used  # noqa: E402
from support.data import DATA  # noqa: E402
from support.structure_truth import KEPT_APART, LOOKED_AT, compare  # noqa: E402


def _captures(folders: list[str]) -> list[tuple[str, Path]]:
    if not folders:
        sets = (("looked at", LOOKED_AT), ("kept apart", KEPT_APART))
        return [(kind, DATA / f"{name}.sqlite.xz") for kind, names in sets for name in names]
    paths = [path for folder in folders for path in Path(folder).glob("*.sqlite.xz")]
    found = sorted(paths, key=lambda path: path.name.split(".")[0])
    return [("looked at", path) for path in found[0::2]] + [("kept apart", path) for path in found[1::2]]


def _time_layers(kernels: int) -> None:
    """Print the processor time of ``layers`` of a training of Llama, repeated, with its ranges and without."""
    with tempfile.TemporaryDirectory() as folder:
        capture, command = Path(folder) / "a.sqlite", [sys.executable, "-m", "nvprof_kit", "layers", "--format", "csv"]
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        packed = DATA / "structure" / "llama.sqlite.xz"
        counts = amplify(packed, capture, -(-kernels // amplify(packed, capture, 1)[table]))
        seconds = []
        for _ in range(2):
            seconds.append(used([*command, str(capture)], of_repository())[1])
            with sqlite3.connect(capture) as db:
                db.execute("DROP TABLE IF EXISTS NVTX_EVENTS")
        annotated, bare = seconds
        print(
            f"{counts[table]:,} kernels: {annotated:.1f} s with ranges, {bare:.1f} s without, {bare / annotated:.2f} x"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--kernels", type=int)
    options = parser.parse_args()
    if options.kernels:
        sys.exit(_time_layers(options.kernels))
    print("| capture | set | blocks found / true | kernel time in its own block | outside |\n|---|---|---:|---:|---:|")
    for kind, capture in _captures(options.folders):
        with tempfile.TemporaryDirectory() as folder:
            result = compare(capture, Path(folder))
        share = f"{100 * result.share:.1f} %" if result.true else ""
        name, outside = capture.name.split(".sqlite")[0], f"{100 * result.outside:.1f} %"
        print(f"| {name} | {kind} | {result.found} / {result.true} | {share} | {outside} |", flush=True)
