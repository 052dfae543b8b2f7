"""The fuzzer: some cases of every kind. ``make fuzz`` runs 12,000."""

from __future__ import annotations

import time

import pytest
from support.lane import examples

from fuzz import fuzz

_SECONDS = 0.5 * examples(3)
"""For each kind, ten times as many in the full lane; a case more is begun until then, and a second one in any case."""


@pytest.mark.parametrize("kind", fuzz.SEEDS)
def test_nothing_breaks(kind: str) -> None:
    """A case that is broken names itself, so that it can be run again: ``fuzz.judge(Case(…))``."""
    began = time.monotonic()
    for tried, case in enumerate(fuzz.chosen(200, 0, kind)):
        if tried >= 2 and time.monotonic() - began > _SECONDS:
            break
        wrong = fuzz.judge(case)
        assert not wrong, f"{case}: {wrong}"
