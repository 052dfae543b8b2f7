"""`global_timer`: its log to the letter, nesting, exceptions, ranges, and what it leaves when killed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvprof_kit import global_timer, open_timers

GlobalTimer = type(global_timer)
LINE = re.compile(
    r"\[RANK (\d+)\] (.+), start=(\d{10}\.\d{6}), end=(\d{10}\.\d{6}), "
    r"cpu_dur=(\d+\.\d{6})s, cuda_dur=(nan|\d+\.\d{3})ms"
)


@pytest.fixture
def timer(tmp_path: Path) -> GlobalTimer:
    return GlobalTimer(tmp_path / "time_log")


def lines(timer: GlobalTimer) -> list[str]:
    return timer.dump().read_text().splitlines()


def test_the_line_is_that_of_profiler_tools(timer):
    timer.start("forward")
    timer.stop("forward")
    path = timer.dump()
    assert path.name == "timer_rank0.log"
    found = LINE.fullmatch(path.read_text().strip())
    assert found and found[1] == "0" and found[2] == "forward"
    start, end, taken = map(float, found.group(3, 4, 5))
    assert end - start == pytest.approx(taken, abs=2e-6)


def test_stages_nest_and_repeat(timer):
    @timer.stage("step")
    def step() -> None:
        with timer.stage("forward"):
            pass
        with timer.stage("forward"), timer.stage("forward"):
            pass

    step()
    step()
    assert [LINE.fullmatch(line)[2] for line in lines(timer)] == ["forward", "forward", "forward", "step"] * 2


def test_a_stop_without_a_start_warns_and_goes_on(timer):
    with pytest.warns(UserWarning, match="'forward' is stopped and was not started"):
        timer.stop("forward")


def test_stages_are_phases(timer, sink):
    with timer.stage("forward"), timer.stage("attention"):
        pass
    assert sink.lines == ["forward", "  attention"]
    assert [range_.category.value for range_ in sink.ranges] == ["phase", "phase"]


def test_off_writes_nothing(timer):
    timer.enabled = False
    with timer.stage("forward"):
        pass
    assert not timer.dump().exists()
    assert not timer.folder.exists()


def test_a_folder_that_cannot_be_made_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    timer = GlobalTimer(tmp_path / "file" / "log")
    with pytest.warns(UserWarning, match="nothing more is timed"), timer.stage("forward"):
        pass
    with timer.stage("forward"):
        pass


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_the_rank_is_the_launchers(variable, monkeypatch, timer):
    monkeypatch.setenv(variable, "3")
    with timer.stage("forward"):
        pass
    path = timer.dump()
    assert path.name == "timer_rank3.log"
    assert path.read_text().startswith("[RANK 3] forward, ")


def test_a_killed_rank_leaves_what_it_had(tmp_path):
    program = (
        "import os, signal\nfrom nvprof_kit import global_timer\n"
        "with global_timer.stage('forward'): pass\nglobal_timer.start('backward')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert done.returncode == -9
    assert LINE.fullmatch((tmp_path / "time_log" / "timer_rank0.log").read_text().strip())


def test_ranks_that_nobody_told_apart_have_logs_of_their_own(timer):
    program = "from nvprof_kit import global_timer\nwith global_timer.stage('forward'): pass\nglobal_timer.dump()"
    with timer.stage("forward"):
        pass
    ours = timer.dump()
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=timer.folder.parent, check=True)
    assert ours.name == "timer_rank0.log" and len(list(timer.folder.iterdir())) == 2
    logs = open_timers(timer.folder).logs
    assert len(logs.stages) == 2
    assert len(logs.warnings) == 1 and "have the launcher set RANK" in logs.warnings[0]
