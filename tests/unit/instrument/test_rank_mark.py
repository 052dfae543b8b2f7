"""The mark by which a process says which rank of which run it is."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import distributed as dist

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model, step
from nvprof_kit._capture.recorder.record import Tool
from nvprof_kit._instrument import ranks
from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit.names import RankName, parse_groups

IDS = ("NVPROF_KIT_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
RANKS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*IDS, *RANKS, *SLURM, "NVPROF_KIT_RANK_MARK"):
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def run_steps(numbers: range) -> None:
    for number in numbers:
        with step(number):
            pass


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "abc"}, RankName(3, 8, "abc")),
        ({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}, RankName(3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"}, RankName(1, 2, "77")),
        ({"SLURM_PROCID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}, RankName(1, None, "77.0")),
        ({"OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "prte-1@1"}, RankName(1, None, "prte-1@1")),
        ({"PMIX_RANK": "1"}, RankName(1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "NVPROF_KIT_RUN_ID": "ours", "SLURM_JOB_ID": "77"}, RankName(0, 2, "ours")),
        ({"SLURM_JOB_ID": "77"}, None),
    ],
)
def test_every_launcher(variables, name, monkeypatch):
    launched(monkeypatch, **variables)
    assert ranks.who() == name


def test_annotate_model_and_steps_mark_once(sink, monkeypatch):
    launched(monkeypatch, RANK="3", WORLD_SIZE="8", NVPROF_KIT_RUN_ID="x")
    marks: list[session.Range] = []
    monkeypatch.setattr(sink, "mark", marks.append)
    with annotate_model(torch.nn.Linear(1, 1)), step(0), step(1):
        pass
    assert [(mark.text, mark.category.value, mark.payload) for mark in marks] == [("rank 3 of 8 run x", "user", 3)]


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({}, ["step 0", "mark rank 3 of 8", "step 1"]),  # inside the first step, which nsys may capture alone
        # in every step where the capture may begin late
        ({"NVPROF_KIT_RANK_MARK": "step"}, ["step 0", "mark rank 3 of 8", "step 1", "mark rank 3 of 8"]),
    ],
)
def test_steps_with_the_mark(variables, lines, sink, monkeypatch):
    launched(monkeypatch, RANK="3", WORLD_SIZE="8", **variables)
    run_steps(range(2))
    assert sink.lines == lines


def test_a_rank_known_later_is_marked_then(sink, monkeypatch):
    with step(0):
        pass
    launched(monkeypatch, RANK="1", WORLD_SIZE="2")
    with step(1):
        pass
    assert sink.lines == ["step 0", "step 1", "mark rank 1 of 2"]


def test_each_window_of_a_schedule_has_the_mark(sink, monkeypatch):
    launched(monkeypatch, RANK="1", WORLD_SIZE="2")
    tool = Tool()
    for number in range(2):
        window = Window(number, number, number)
        tool.start(window)
        tool.stop(window)
    assert sink.lines == ["start window", "mark rank 1 of 2", "end window"] * 2


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def listed(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if "groups" in line]


def test_groups_are_listed_once_and_again_when_there_are_others(sink, alone):
    with annotate_model(torch.nn.Linear(1, 1)):
        run_steps(range(2))
        dist.new_group([0], group_desc="mesh_tp")
        run_steps(range(2, 4))
    first, second = listed(sink.lines)
    assert first == "mark groups 0 default_pg 0"
    assert [group.description for group in parse_groups(second.removeprefix("mark "))] == ["default_pg", "mesh_tp"]
    assert sink.lines.index("step 2") < next(i for i, line in enumerate(sink.lines) if "mesh_tp" in line)


def test_groups_in_every_step_where_the_capture_may_begin_late(sink, alone, monkeypatch):
    monkeypatch.setenv("NVPROF_KIT_RANK_MARK", "step")
    run_steps(range(3))
    assert len(listed(sink.lines)) == 3


def test_a_program_that_creates_groups_in_every_step_is_listed_a_bounded_number_of_times(sink, monkeypatch):
    count = [1]

    def counted() -> tuple[int, int]:
        count[0] += 1
        return count[0], 0

    monkeypatch.setattr(ranks, "group_count", counted)
    monkeypatch.setattr(ranks, "groups_mark", lambda: "groups 0 a 0")
    run_steps(range(200))
    assert len(listed(sink.lines)) == 64


def test_another_pytorch_never_fails_the_run(sink, alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", ModuleType("another"))
    assert ranks.group_count() == (0, 0) and ranks.groups_mark() == ""
    with step(0):
        pass
    assert listed(sink.lines) == []
