"""Compares results with the files in `tests/golden`; ``--update-golden`` rewrites them.

A file of csv has the columns that are compared: a new column of the answer rewrites none.
"""

import csv
import io
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    """Call it with the path of a file below `tests/golden` and the text that the test found."""

    def __init__(self, update: bool) -> None:
        self.update = update

    def __call__(self, name: str, found: str) -> None:
        path = FOLDER / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
        expected = path.read_text(encoding="utf-8")
        assert (with_columns_of(expected, found) if path.suffix == ".csv" else found) == expected


def with_columns_of(expected: str, found: str) -> str:
    """A text of csv with the columns that another text has, in their order."""
    names = next(csv.reader(io.StringIO(expected)))
    rows = list(csv.DictReader(io.StringIO(found)))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    lacks = [name for name in names if rows and name not in rows[0]]
    assert not lacks, f"columns that are gone: {lacks}"
    return text.getvalue()
