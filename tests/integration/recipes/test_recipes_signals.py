"""However a profiled run ends: a readable report, the program's own status, nothing left running or half-written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.recipes import VERBS, end_all, gone, python, ranges, run, start, wait_for

pytestmark = pytest.mark.nsys

PROGRAM = """
import os, pathlib, sys, time
import nvprof_kit
for number in (2, 3):
    with nvprof_kit.step(number), nvprof_kit.layer_range(f"layers.{number}"):
        time.sleep(0.01)
time.sleep(0.5)  # nsys takes the ranges over now and then: what is cut off may lack the last of them
pathlib.Path("pid").write_text(str(os.getpid()))
exec(sys.argv[1])
"""
EVERYTHING = ["step 2", "layers.2", "step 3", "layers.3"]


def readable(path: Path) -> bool:
    """Whether an export is whole and has the program's ranges, but for the last where it was cut off."""
    found = ranges(path)
    return found[:2] == EVERYTHING[:2] and found == EVERYTHING[: len(found)]


PROFILE = [*VERBS["profile"], "-x", "--trace=nvtx", "--"]


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        pytest.param("raise RuntimeError('boom')", 1, marks=pytest.mark.slow),
        pytest.param("os.abort()", 128 + 6, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", 128 + 9),
    ],
)
def test_a_program_that_crashes(nsys, ending, status, tmp_path):
    done = run("profile", "-x", "--trace=nvtx", "--", *python(PROGRAM, tmp_path, ending), cwd=tmp_path, NSYS=nsys)
    assert done.returncode == status, done.stderr
    assert readable(tmp_path / "run.sqlite")
    assert not (tmp_path / ".run.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom"),
    [(signal.SIGINT, "its group"), (signal.SIGTERM, "the script"), (signal.SIGHUP, "its group")],
)
def test_a_run_that_is_interrupted(nsys, number, whom, tmp_path):
    running = start([*PROFILE, *python(PROGRAM, tmp_path, "time.sleep(100)")], tmp_path, NSYS=nsys)
    pid = int(wait_for(tmp_path / "pid"))
    time.sleep(0.5)
    if whom == "the script":
        running.send_signal(number)
    else:
        os.killpg(running.pid, number)
    said, _ = running.communicate(timeout=60)
    assert gone(pid), said
    assert running.returncode == 128 + (signal.SIGTERM if number is signal.SIGHUP else number), said
    assert readable(tmp_path / "run.sqlite")
    assert (tmp_path / "run.nsys-rep").stat().st_size > 0


def child_of(parent: int, program: str) -> int:
    """The child of a process that runs some program."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=False
    )
    return next(int(line.split()[0]) for line in listed.stdout.splitlines() if program in line)


@pytest.mark.slow
def test_nsys_that_is_killed_leaves_no_orphan_and_no_report_that_is_none(nsys, tmp_path):
    running = start([*PROFILE, *python(PROGRAM, tmp_path, "time.sleep(100)")], tmp_path, NSYS=nsys)
    pid = int(wait_for(tmp_path / "pid"))
    os.kill(child_of(running.pid, " profile "), signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGKILL, said
    assert gone(pid, 1), said
    left = tmp_path / "run.sqlite"
    assert not left.exists() or readable(left)


def test_a_run_killed_as_a_whole_leaves_nothing_under_the_reports_name(nsys, tmp_path):
    running = start(
        [*PROFILE, *python(PROGRAM, tmp_path, "time.sleep(100)")], tmp_path, NSYS=nsys, KILLED=str(tmp_path)
    )
    wait_for(tmp_path / "pid")
    time.sleep(0.5)
    end_all("KILLED", str(tmp_path))
    running.communicate(timeout=60)
    assert [path.name for path in tmp_path.glob("run.*")] == []
    again = run("profile", "-x", "--trace=nvtx", "--", sys.executable, "-c", "0", cwd=tmp_path, NSYS=nsys)
    assert again.returncode == 2 and ".run.partial" in again.stderr and again.stderr.count("\n") == 1


@pytest.mark.slow
def test_windows_of_a_schedule(nsys, tmp_path):
    loop = """
import time, nvprof_kit
with nvprof_kit.record(schedule=None) as profiling:
    for number in range(7):
        with nvprof_kit.step(number):
            time.sleep(0.01)
        profiling.step()
        time.sleep(0.3)  # a report is begun anew: nsys needs a moment between windows
"""
    schedule = "skip_first=1,wait=1,active=2,repeat=2"  # steps 2 and 3, 5 and 6
    done = run(
        "profile", "-x", "--trace=nvtx", "--schedule", schedule, "--", *python(loop, tmp_path), cwd=tmp_path, NSYS=nsys
    )
    assert done.returncode == 0, done.stderr
    assert ranges(tmp_path / "run.1.sqlite") == ["window", "step 2", "step 3"]
    assert ranges(tmp_path / "run.2.sqlite") == ["window", "step 5", "step 6"]


def test_the_program_reads_its_input_and_keeps_its_output_apart(nsys, tmp_path):
    code = "import sys; print(sys.stdin.read().upper()); print('aside', file=sys.stderr)"
    done = subprocess.run(
        [*PROFILE, sys.executable, "-c", code],
        input="words",
        cwd=tmp_path,
        env={**os.environ, "NSYS": nsys},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "WORDS" in done.stdout and "aside" in done.stderr
