"""Compares results with the files in `tests/golden`; ``--update-golden`` rewrites them."""

from __future__ import annotations

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
        assert found == path.read_text(encoding="utf-8")
