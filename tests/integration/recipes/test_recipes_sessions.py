"""nvprof-kit session launch, start, stop and status: several captures of one program, under real releases of nsys."""

import os
import signal

import pytest
from support.cli import execute
from support.recipes import VERBS, gone, python, ranges, refuse, run, start, wait_for, wait_for_next

PROGRAM = """
import os, pathlib, signal, sys, time
import nvprof_kit
def save(*_):
    time.sleep(0.5)
    pathlib.Path("saved").touch()
    sys.exit(5)
if "saving" in sys.argv:
    signal.signal(signal.SIGTERM, save)
for _ in range(100_000):
    with nvprof_kit.step(), nvprof_kit.layer_range("layers.0"):
        time.sleep(0.02)
    pathlib.Path("pid").write_text(str(os.getpid()))
"""


def session() -> str:
    return f"test{os.getpid()}"


@pytest.mark.slow
@pytest.mark.every_nsys
def test_two_captures_of_one_program(nsys, tmp_path):
    here = {"cwd": tmp_path, "NSYS": nsys}
    name = session()
    launched = [*VERBS["launch"], "-s", name, "-x", "--trace=nvtx", "--", *python(PROGRAM, tmp_path, "saving")]
    running = start(launched, **here)
    try:
        pid = int(wait_for(tmp_path / "pid"))
        assert name in run("status", **here).stdout
        assert run("launch", "-s", name, "--", "true", **here).returncode == 2
        for _ in range(2):
            begun = run("start", "-s", name, **here)
            assert begun.returncode == 0, begun.stderr
            assert run("start", "-s", name, **here).returncode == 2
            # from an ssh session and from a batch job, say
            ended = run("stop", "-s", name, XDG_RUNTIME_DIR=str(tmp_path / "another"), HOME="/nonexistent", **here)
            assert ended.returncode == 0, ended.stderr
            assert ".partial" not in begun.stdout + begun.stderr + ended.stdout + ended.stderr
        refused = run("stop", "-s", name, **here)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    finally:
        ended = execute(nsys, "shutdown", f"--session={name}", "--kill=sigterm", cwd=tmp_path)
        said, _ = running.communicate(timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert gone(pid), said
    assert (tmp_path / "saved").exists() and running.returncode == 5, said
    for number in (1, 2):
        assert "layers.0" in ranges(tmp_path / f"{name}.{number}.sqlite")
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.nsys
@pytest.mark.slow
def test_a_program_that_ends_while_it_is_captured(nsys, tmp_path):
    here = {"cwd": tmp_path, "NSYS": nsys}
    name = session()
    launched = [*VERBS["launch"], "-s", name, "-x", "--trace=nvtx", "--", *python(PROGRAM, tmp_path)]
    running = start(launched, **here)
    pid = int(wait_for(tmp_path / "pid"))
    assert run("start", "-s", name, "-o", "cut", **here).returncode == 0
    wait_for_next(tmp_path / "pid")
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert gone(pid), said
    ended = run("stop", "-s", name, **here)
    assert ended.returncode == 0, ended.stderr
    assert "cut.nsys-rep" in ended.stderr
    assert "layers.0" in ranges(tmp_path / "cut.sqlite")


@pytest.mark.nsys
def test_no_session(nsys, tmp_path):
    done = run("start", "-s", "nobody", cwd=tmp_path, NSYS=nsys)
    assert (done.returncode, done.stderr) == (
        2,
        "nvprof-kit: no session nobody; start the program with nvprof-kit session launch, and see nvprof-kit session "
        "status\n",
    )


@pytest.mark.parametrize("script", ["launch", "start", "stop", "status"])
def test_without_nsys(script, tmp_path):
    argv = ["--", "true"] if script == "launch" else []
    done = refuse(script, *argv, cwd=tmp_path, NSYS="/no/nsys")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)


def test_a_session_has_a_plain_name(tmp_path):
    assert refuse("stop", "-s", "../x", cwd=tmp_path).returncode == 2
