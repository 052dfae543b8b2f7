"""How a run under a real nsys ends, and what it leaves to the program: a readable report, the program's own status,
its terminal, TMPDIR, time to save and output; nothing left running or half-written.
"""

import contextlib
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from support import recipes
from support.cli import execute
from support.recipes import VERBS, end_all, environment, gone, python, ranges, run, start, wait_for

pytestmark = pytest.mark.nsys
PROFILE = [*VERBS["profile"], "-x", "--trace=nvtx", "--"]

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
    ("number", "whom"), [(signal.SIGINT, "its group"), (signal.SIGTERM, "the script"), (signal.SIGHUP, "its group")]
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
    listed = execute("ps", "-o", "pid=,args=", "--ppid", str(parent))
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
    command = [*PROFILE, *python(PROGRAM, tmp_path, "time.sleep(100)")]
    running = start(command, tmp_path, NSYS=nsys, KILLED=str(tmp_path))
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
    words = ("-x", "--trace=nvtx", "--schedule", schedule, "--", *python(loop, tmp_path))
    done = run("profile", *words, cwd=tmp_path, NSYS=nsys)
    assert done.returncode == 0, done.stderr
    assert ranges(tmp_path / "run.1.sqlite") == ["window", "step 2", "step 3"]
    assert ranges(tmp_path / "run.2.sqlite") == ["window", "step 5", "step 6"]


def test_the_program_reads_its_input_and_keeps_its_output_apart(nsys, tmp_path):
    code = "import sys; print(sys.stdin.read().upper()); print('aside', file=sys.stderr)"
    done = execute(*PROFILE, sys.executable, "-c", code, cwd=tmp_path, stdin="words", NSYS=nsys)
    assert "WORDS" in done.stdout and "aside" in done.stderr


ASKING = """
import os, pathlib, sys, time
import nvprof_kit
with nvprof_kit.step(1):
    name = input("name? ")
print("hello", name, sys.stdin.isatty(), sys.stdout.isatty(), os.environ["TMPDIR"], flush=True)
time.sleep(1)  # nsys takes the ranges over now and then
pathlib.Path("ready").write_text("yes")
try:
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(0.5)  # the second interrupt does not come here
    sys.exit(130)
"""

SAVING = """
import os, pathlib, signal, sys, time
import nvprof_kit
def save(*_):
    time.sleep(1)
    pathlib.Path("saved").write_text("yes")
    sys.exit(5)
signal.signal(signal.SIGTERM, save)
with nvprof_kit.step(1):
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path("ready").write_text("yes")
time.sleep(100)
"""


def read_until(terminal: int, text: str, seconds: float = 60) -> str:
    """What a terminal shows until some text is in it; '' stands for its end."""
    shown, end = "", time.monotonic() + seconds
    while not text or text not in shown:
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # nobody writes any more
            break
        assert time.monotonic() < end, shown
    return shown


@pytest.mark.slow
def test_a_terminal_is_the_programs_and_two_quick_interrupts_leave_a_report(nsys, tmp_path):
    spool = tmp_path / "small"
    spool.mkdir()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = [*PROFILE, *python(ASKING, tmp_path)]
        os.execve(words[0], words, environment(NSYS=nsys, TMPDIR=str(spool)))
    shown = read_until(terminal, "name? ")
    os.write(terminal, b"world\n")
    shown += read_until(terminal, "hello")
    wait_for(tmp_path / "ready")
    os.write(terminal, b"\x03")
    time.sleep(0.2)
    os.write(terminal, b"\x03")
    shown += read_until(terminal, "")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGINT, shown
    os.close(terminal)
    assert f"hello world True True {spool}" in shown
    assert ranges(tmp_path / "run.sqlite") == ["step 1"]
    # nsys's own words neither name what was moved nor draw its progress; the spool was beside the report
    assert ".partial" not in shown and "[1/2]" not in shown and "Generating" not in shown
    assert "next: nvprof-kit layers run.sqlite" in shown
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"program.py", "ready", "run.nsys-rep", "run.sqlite", "small"}
    assert list(spool.iterdir()) == []


@pytest.mark.slow
def test_a_program_that_handles_sigterm_is_waited_for(nsys, tmp_path):
    running = start([*PROFILE, *python(SAVING, tmp_path)], tmp_path, NSYS=nsys)
    wait_for(tmp_path / "ready")
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 5, said
    assert (tmp_path / "saved").exists()
    assert ranges(tmp_path / "run.sqlite") == ["step 1"]
    assert profilers_of(tmp_path) == []  # 2022.4 and 2023.4 would leave their agent running


def profilers_of(folder: Path) -> list[str]:
    """The processes of nsys that work for a folder."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                name = (process / "comm").read_text().strip()
                left += [name] if name.startswith("nsys") and recipes.alive(int(process.name)) else []
    return left


def test_nothing_that_was_captured_is_a_failure(nsys, tmp_path):
    stepping = "import nvprof_kit\nfor number in range(3):\n    with nvprof_kit.step(number):\n        pass\n"
    words = ("-x", "--trace=nvtx", "--step", "99", "--", *python(stepping, tmp_path))
    done = run("profile", *words, cwd=tmp_path, NSYS=nsys)
    assert done.returncode == 1
    assert "nvprof-kit: no report: nothing was captured: step 99 never began" in done.stderr
    words = ("-x", "--trace=nvtx", "-x", "-c nvtx", "-x", "-p", "-x", "a@b", "--", *python(stepping, tmp_path))
    done = run("profile", *words, cwd=tmp_path, NSYS=nsys)
    assert "nvprof-kit: no report: nothing was captured: no range 'a@b' began" in done.stderr
    done = run("profile", "--", *python("print('plain')", tmp_path), cwd=tmp_path, NSYS=nsys)
    assert (done.returncode, done.stdout) == (1, "plain\n")
    assert "nothing was captured: the report has no range and no CUDA call" in done.stderr


def test_what_a_dry_run_prints_can_be_pasted(nsys, tmp_path):
    loop = "import nvprof_kit, time\nfor number in range(3):\n    with nvprof_kit.step(number): time.sleep(0.1)\n"
    words = ("-x", "--trace=nvtx", "--step", "1", "-o", "my folder/%h", "-n", "--", *python(loop, tmp_path))
    command = run("profile", *words, cwd=tmp_path, NSYS=nsys).stdout
    pasted = execute("bash", "-c", command, cwd=tmp_path)
    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    host = os.uname().nodename
    assert ranges(tmp_path / "my folder" / f"{host}.sqlite") == ["step 1"]


def test_a_name_with_a_variable_is_not_overwritten(nsys, tmp_path):
    (tmp_path / "run-me.sqlite").touch()
    done = run("profile", "-o", "run-%q{USER}", "--", "true", cwd=tmp_path, NSYS=nsys, USER="me")
    assert done.returncode == 2 and re.search(r"run-me\.sqlite exists", done.stderr)
