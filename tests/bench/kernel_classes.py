"""Precision and recall of the kernel classes on the labelled names in ``tests/data/kernel-names.tsv``.

Run from the repository: ``python tests/bench/kernel_classes.py`` prints the table of ``docs/kernel-classes.md``.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from support.captures.nsys_file import NsysFile  # noqa: E402

NAMES = TESTS / "data" / "kernel-names.tsv"


def labels() -> dict[str, str]:
    """The class of each labelled kernel name."""
    with NAMES.open(encoding="utf-8", newline="") as file:
        return {row["name"]: row["class"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


def classes_of(names: list[str], folder: Path) -> dict[str, str]:
    """The classes that ``summary --view kernel`` gives to kernels with these names."""
    file = NsysFile(folder / "names.sqlite")
    file.range_("layer", 0, 10 * len(names) + 10)
    for number, name in enumerate(names):
        file.kernel(10 * number + 5, 10 * number + 9, launched=(10 * number + 1, 10 * number + 2), name=name)
    command = [sys.executable, "-m", "nvprof_kit", "summary", str(file.write()), "--view", "kernel", "--format", "csv"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=TESTS.parent).stdout
    return {row["name"]: row["kernel_class"] for row in csv.DictReader(io.StringIO(text))}


def scores(truth: dict[str, str], answers: dict[str, str]) -> list[tuple[str, int, float, float]]:
    """Class, names, precision and recall."""
    labelled, answered = Counter(truth.values()), Counter(answers[name] for name in truth)
    right = Counter(label for name, label in truth.items() if answers[name] == label)
    return [
        (label, labelled[label], right[label] / max(answered[label], 1), right[label] / labelled[label])
        for label in sorted(labelled)
    ]


if __name__ == "__main__":
    truth = labels()
    with tempfile.TemporaryDirectory() as folder:
        answers = classes_of(list(truth), Path(folder))
    print("| class | names | precision | recall |\n|---|---:|---:|---:|")
    for label, count, precision, recall in scores(truth, answers):
        print(f"| `{label}` | {count} | {100 * precision:.1f} % | {100 * recall:.1f} % |")
    for name, label in truth.items():
        if answers[name] != label:
            print(f"{label} is taken for {answers[name]}: {name[:120]}", file=sys.stderr)
