"""A backend that records ranges, in place of a tool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranges.sink import Sink

import nvprof_kit._instrument.session as session


@pytest.fixture
def sink() -> Iterator[Sink]:
    """Ranges go to the sink while the test runs; it fails if one is left open."""
    sink = Sink()
    session.activate(sink)
    yield sink
    open_count = sink.open_count()
    session.deactivate()
    assert open_count == 0
    assert session.backend is None
