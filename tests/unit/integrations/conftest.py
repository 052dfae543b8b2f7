"""A loop's ranges, written down."""

from collections.abc import Iterator

import pytest
from support.ranges.sink import Outline, listening


@pytest.fixture
def heard() -> Iterator[Outline]:
    yield from listening(Outline())
