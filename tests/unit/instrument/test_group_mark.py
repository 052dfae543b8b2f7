"""The mark that lists the process groups of torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nvprof_kit import annotate_model, step
from nvprof_kit._instrument import ranks
from nvprof_kit.names import parse_groups

torch = pytest.importorskip("torch")
dist = torch.distributed


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def listed(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if "groups" in line]


def test_groups_are_listed_once_and_again_when_there_are_others(sink, alone: None) -> None:
    with annotate_model(torch.nn.Linear(1, 1)):
        for number in range(2):
            with step(number):
                pass
        dist.new_group([0], group_desc="mesh_tp")
        for number in range(2, 4):
            with step(number):
                pass
    first, second = listed(sink.lines)
    assert first == "mark groups 0 default_pg 0"
    assert [group.description for group in parse_groups(second.removeprefix("mark "))] == ["default_pg", "mesh_tp"]
    assert sink.lines.index("step 2") < next(i for i, line in enumerate(sink.lines) if "mesh_tp" in line)


def test_groups_in_every_step_where_the_capture_may_begin_late(
    sink, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVPROF_KIT_RANK_MARK", "step")
    for number in range(3):
        with step(number):
            pass
    assert len(listed(sink.lines)) == 3


def test_a_program_that_creates_groups_in_every_step_is_listed_a_bounded_number_of_times(
    sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvprof_kit._instrument import ranks

    count = [1]

    def counted() -> tuple[int, int]:
        count[0] += 1
        return count[0], 0

    monkeypatch.setattr(ranks, "group_count", counted)
    monkeypatch.setattr(ranks, "groups_mark", lambda: "groups 0 a 0")
    for number in range(200):
        with step(number):
            pass
    assert len(listed(sink.lines)) == 64


def test_another_pytorch_never_fails_the_run(sink, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", ModuleType("another"))
    assert ranks.group_count() == (0, 0) and ranks.groups_mark() == ""
    with step(0):
        pass
    assert listed(sink.lines) == []
