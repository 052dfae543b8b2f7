"""An export of nsys that a test writes its events into, and backends that record ranges, in place of a tool."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.ranges.sink import Outline, Sink, listening


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "run.sqlite")


@pytest.fixture
def sink() -> Iterator[Sink]:
    yield from listening(Sink())


@pytest.fixture
def heard() -> Iterator[Outline]:
    yield from listening(Outline())
