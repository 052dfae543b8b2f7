"""An export that a test writes its events into, backends that record ranges, a process group without other ranks."""

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


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of a rank and a size that has no other ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, size = request.param
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield
    dist.destroy_process_group()
