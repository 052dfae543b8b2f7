"""A loop's ranges, written down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranges.outline import Outline

import nvprof_kit._instrument.session as session


@pytest.fixture
def heard() -> Iterator[Outline]:
    """Ranges are written down while the test runs; it fails if one is left open."""
    outline = Outline()
    session.activate(outline)
    yield outline
    left = outline.depth
    session.deactivate()
    assert left == 0
