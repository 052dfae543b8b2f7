"""A loop's ranges, written down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranges.outline import Outline

from nvprof_kit._instrument.ranges import state


@pytest.fixture
def heard() -> Iterator[Outline]:
    """Ranges are written down while the test runs; it fails if one is left open."""
    outline = Outline()
    state.activate(outline)
    yield outline
    left = outline.depth
    state.deactivate()
    assert left == 0
