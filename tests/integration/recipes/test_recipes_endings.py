"""What a run under a real nsys leaves to the program: its terminal, its TMPDIR, its time to save, its output."""

import contextlib
import os
import pty
import re
import signal
import time
from pathlib import Path

import pytest
from support import recipes
from support.cli import execute
from support.recipes import VERBS, environment, python, ranges, run, start, wait_for

pytestmark = pytest.mark.nsys
PROFILE = VERBS["profile"]

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
        words = [*PROFILE, "-x", "--trace=nvtx", "--", *python(ASKING, tmp_path)]
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
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "program.py",
        "ready",
        "run.nsys-rep",
        "run.sqlite",
        "small",
    ]
    assert list(spool.iterdir()) == []


@pytest.mark.slow
def test_a_program_that_handles_sigterm_is_waited_for(nsys, tmp_path):
    running = start([*PROFILE, "-x", "--trace=nvtx", "--", *python(SAVING, tmp_path)], tmp_path, NSYS=nsys)
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
