"""The mark that lists the process groups of torch.distributed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nvprof_kit import annotate_model, step
from nvprof_kit._instrument import ranks
from nvprof_kit._trace.jobs.finding import groups_of_marks
from nvprof_kit.names import GroupName, groups_text, parse_groups

torch = pytest.importorskip("torch")
dist = torch.distributed


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(10_000), "0-9999"),
        (range(0, 64, 2), "0:62:2"),
        ((0, 1, 4, 5), "0-1,4-5"),
        ((3,), "3"),
        ((0, 2), "0,2"),
        ((0, 1, 3, 5, 7), "0-1,3:7:2"),
    ],
)
def test_ranks_are_ranges_and_strides(ranks: range | tuple[int, ...], text: str) -> None:
    group = GroupName("1", "mesh_tp", tuple(ranks))
    assert groups_text([group]) == f"groups 1 mesh_tp {text}"
    assert parse_groups(groups_text([group])) == [group]


def test_any_ranks_and_back() -> None:
    noise = random.Random(0)
    for _ in range(300):
        ranks = tuple(sorted(noise.sample(range(48), noise.randint(1, 30))))
        assert parse_groups(groups_text([GroupName("", "a; b", ranks)])) == [GroupName("", "a_b", ranks)]


def test_the_text_is_bounded() -> None:
    odd = tuple(rank * rank for rank in range(1, 400))
    many = [GroupName(str(number), "x" * 200, (number,)) for number in range(100)]
    text = groups_text([GroupName("0", "odd", odd), *many])
    assert len(text) <= 4_000 and "odd" not in text and len(parse_groups(text)) > 20


@pytest.mark.parametrize(
    "text",
    ["groups", "groups ", "groups a", "groups a b c", "groups a b 5-", "groups a b 0-99999999", "groups a b 0:9:0"],
)
def test_damaged_marks_tell_nothing(text: str) -> None:
    assert parse_groups(text) == [] and groups_of_marks([text]) == ""


def test_groups_of_several_marks_are_joined() -> None:
    texts = ["rank 0 of 4", "groups 0 default_pg 0-3", "groups 0 default_pg 0-3; 1 tp 0-1"]
    assert groups_of_marks(texts) == "groups 0 default_pg 0-3; 1 tp 0-1"


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
