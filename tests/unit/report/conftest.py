"""Reports are printed at their default width, whatever the terminal that runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def default_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
