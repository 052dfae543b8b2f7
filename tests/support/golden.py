"""Compares results with the files in `tests/golden`; ``--update-golden`` rewrites them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    """Call it with the path of a file below `tests/golden` and the text that the test found. Of a table in csv the
    columns of the file are compared: a new column rewrites no file.
    """

    def __init__(self, update: bool) -> None:
        self.update = update

    def __call__(self, name: str, found: str) -> None:
        path = FOLDER / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
        golden = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            header, *rows = csv.reader(io.StringIO(found))
            columns = [header.index(name) for name in next(csv.reader(io.StringIO(golden))) if name in header]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([row[i] for i in columns] for row in (header, *rows))
            found = text.getvalue()
        assert found == golden
