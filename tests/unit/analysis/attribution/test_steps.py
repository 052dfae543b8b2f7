"""What a step is: instances of steps, whatever their numbers, in every table."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit


def instances(file: NsysFile) -> list[int]:
    file.kernel(200, 210, launched=(150, 151))
    return nvprof_kit.open(file.write()).steps["step"].tolist()


@pytest.fixture
def two_epochs(tmp_path: Path) -> nvprof_kit.Capture:
    """Two epochs of the steps 0 and 1, 1000 ns each, 10 ns of forward on the GPU, and between them 40 of validation."""
    file = NsysFile(tmp_path / "epochs.sqlite")
    for place, begin in enumerate((0, 1000, 5000, 6000)):
        file.range_(f"step {place % 2}", begin, begin + 1000, category="step", payload=place % 2)
        file.range_("a", begin + 10, begin + 100, category="forward")
        file.kernel(begin + 200, begin + 210, launched=(begin + 20, begin + 21))
    file.range_("a", 3000, 3100, category="forward")
    file.kernel(3200, 3240, launched=(3020, 3021))
    return nvprof_kit.open(file.write())


def test_a_number_that_returns_is_a_step_each_time(two_epochs: nvprof_kit.Capture) -> None:
    assert two_epochs.steps["step"].tolist() == [0, 1, 0, 1]
    assert two_epochs.steps["wall_ns"].tolist() == [1000] * 4


def test_a_step_in_a_step_is_a_part_of_it(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "micro.sqlite")
    for begin in (0, 1000):
        file.range_(f"step {begin // 1000}", begin, begin + 900, category="step")
        for micro in range(3):
            file.range_(f"step {micro}", begin + 300 * micro, begin + 300 * micro + 200, category="step")
    assert instances(file) == [0, 1]


def test_ranks_of_one_capture_run_a_step_together(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "ranks.sqlite")
    for number, begin in ((0, 0), (1, 1000), (0, 2000), (1, 3000)):
        file.range_(f"step {number}", begin, begin + 1000, category="step", pid=7, tid=7)
        file.range_(f"step {number}", begin + 100, begin + 950, category="step", pid=8, tid=8)
    assert instances(file) == [0, 1, 0, 1]


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)])
def test_steps_that_begin_together_are_ordered_by_thread(tmp_path: Path, threads: tuple[int, int]) -> None:
    """Not by the order of the rows in the file. Step 1 of thread 2 and step 2 of thread 1 begin at 10."""
    file = NsysFile(tmp_path / "together.sqlite")
    for tid in threads:
        file.range_(f"step {3 - tid}", 10, 40, category="step", tid=tid, payload=3 - tid)
        file.kernel(20, 21, launched=(20, 21), tid=tid)
    assert nvprof_kit.open(file.write()).steps["step"].tolist() == [2, 1]


@pytest.mark.parametrize(("range_end", "before", "wall_ns"), [(400, False, 150), (900, False, 1000), (400, True, 860)])
def test_the_first_step_of_a_pipelined_engine_starts_on_the_gpu(
    tmp_path: Path, range_end: int, before: bool, wall_ns: int
) -> None:
    """Its range had ended before the GPU came to it, so the GPU was busy with work from before the capture."""
    file = NsysFile(tmp_path / "engine.sqlite")
    file.range_("execute_context_0(0)_generation_16(16)", 0, range_end, category="step")
    if before:  # and where the capture has that work, the step starts when it ends
        file.kernel(130, 140)
    file.kernel(850, 900, launched=(200, 210))
    file.kernel(950, 1000, launched=(220, 230))
    assert nvprof_kit.open(file.write()).steps["wall_ns"].tolist() == [wall_ns]
