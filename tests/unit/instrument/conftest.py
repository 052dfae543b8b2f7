"""A backend that records ranges, in place of a tool."""

from collections.abc import Iterator

import pytest
from support.ranges.sink import Outline, Sink, listening


@pytest.fixture
def sink() -> Iterator[Sink]:
    yield from listening(Sink())


@pytest.fixture
def outline() -> Iterator[Outline]:
    yield from listening(Outline())
