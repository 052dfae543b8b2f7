"""Half a minute of the fuzzer: some cases of every kind. ``make fuzz`` runs 12,000."""

from __future__ import annotations

import time

import pytest

from fuzz import fuzz

_SECONDS = 3.0
"""For each kind; a case more is begun until then."""


@pytest.mark.parametrize("kind", fuzz.SEEDS)
def test_nothing_breaks(kind: str) -> None:
    """A case that is broken names itself, so that it can be run again: ``fuzz.judge(Case(…))``."""
    began = time.monotonic()
    tried = 0
    for case in fuzz.chosen(200, 0, kind):
        wrong = fuzz.judge(case)
        assert not wrong, f"{case}: {wrong}"
        tried += 1
        if time.monotonic() - began > _SECONDS:
            break
    assert tried >= 2
