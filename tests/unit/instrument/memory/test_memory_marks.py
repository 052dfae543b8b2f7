"""The memory that layers' ranges carry: when it is read, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

import nvprof_kit._instrument.session as session
from nvprof_kit.names import Category

Nvtx, NvtxWithMemory, Range = session.Nvtx, session.NvtxWithMemory, session.Range


class Level(NamedTuple):
    allocated: int
    peak: int


LAYER, PHASE = Range("layers.0", Category.FORWARD, 0), Range("forward", Category.PHASE)
INNER = Range("layers.0.mlp", Category.BACKWARD, 0)


class Noting(NvtxWithMemory):
    """Notes the marks; reads what it is told, the last again and again."""

    def __init__(self, levels: list[Level | None], before: Nvtx | None = None) -> None:
        super().__init__(lambda: levels.pop(0) if len(levels) > 1 else levels[0], before)
        self.said: list[tuple[str, int | None]] = []

    def mark(self, range_: Range) -> None:
        assert range_.category is Category.MEMORY
        self.said.append((range_.text, range_.payload))


def test_begin_end_and_a_peak_where_it_rises() -> None:
    backend = Noting([Level(10, 10), Level(20, 20), Level(30, 90), Level(15, 90)])
    for range_ in (PHASE, LAYER, INNER):
        backend.open(range_, range_)
    for range_ in (INNER, LAYER, PHASE):
        backend.close(range_)
    assert backend.said == [
        ("allocated at begin", 10),
        ("allocated at begin", 20),
        ("peak inside", 90),
        ("allocated at end", 30),
        ("peak inside", 90),
        ("allocated at end", 15),
    ]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvtx]:
    backend = Nvtx()
    monkeypatch.setattr(session, "_tool", backend)
    session._switch(backend)
    yield backend
    session._switch(None)


def test_the_attached_tool_is_told_from_then_on(tool: Nvtx) -> None:
    session.add_memory_marks()
    assert isinstance(session.backend, NvtxWithMemory)
    assert session.backend.thread is tool.thread
    assert session.backend is session._tool


@pytest.mark.parametrize(("value", "kind"), [("1", NvtxWithMemory), ("0", Nvtx), ("", Nvtx)])
def test_the_environment_asks_for_it(value: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "mode", "on")
    monkeypatch.setenv("NVPROF_KIT_MEMORY", value)
    assert type(session._tool_backend()) is kind
    monkeypatch.setattr(session, "mode", "off")
    assert session._tool_backend() is None
