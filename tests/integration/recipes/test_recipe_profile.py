"""nvprof-kit profile: its exact command, its refusals, and what it leaves under real releases of nsys."""

import os
import sys
from functools import partial

import pytest
from support import cli, recipes
from support.recipes import python, ranges
from support.unannotated import PROGRAM as PROGRAM_UNANNOTATED

import nvprof_kit

PROGRAM = """
import pathlib, signal, sys, time
import nvprof_kit
def save(*_):
    time.sleep(0.5)
    pathlib.Path("saved").touch()
    sys.exit(5)
signal.signal(signal.SIGTERM, save)
print("hello from the program", flush=True)
for number in (2, 3):
    with nvprof_kit.step(number), nvprof_kit.layer_range(f"layers.{number}"):
        time.sleep(0.01)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
EVERYTHING = ["step 2", "layers.2", "step 3", "layers.3"]


run = partial(recipes.run, "profile")


def test_a_full_disk_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSYS", "true")
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 1 << 20, 1000, 99, 99, 0, 0, 0, 0, 255)))
    assert cli.run("profile", "-o", "deep/run", "--", "true") == 2
    assert " has 99 MB left, and a report needs more" in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_long_capture_is_warned_of(tmp_path):
    done = run("-x", "--duration=61", "--", "true", cwd=tmp_path, NSYS="true")
    assert done.returncode == 1 and "beyond 60 s" in done.stderr


@pytest.mark.every_nsys
def test_real_run(nsys, tmp_path):
    done = run("--", *python(PROGRAM, tmp_path), "0.2", cwd=tmp_path, NSYS=nsys)
    assert done.returncode == 7, done.stderr
    assert "hello from the program" in done.stdout
    assert (tmp_path / "run.nsys-rep").stat().st_size > 0
    assert ranges(tmp_path / "run.sqlite") == EVERYTHING

    again = run("--", *python(PROGRAM, tmp_path), "0.2", cwd=tmp_path, NSYS=nsys)
    assert (again.returncode, again.stdout) == (2, "")
    forced = run("--force", "-x", "-t nvtx", "--", *python(PROGRAM, tmp_path), "0.2", cwd=tmp_path, NSYS=nsys)
    assert forced.returncode == 7, forced.stderr
    assert ranges(tmp_path / "run.sqlite") == EVERYTHING
    never = ("-x", "-t", "-x", "nvtx,cuda", "-x", "-ccudaProfilerApi", "--", *python(PROGRAM, tmp_path), "0.2")
    done = run("--force", *never, cwd=tmp_path, NSYS=nsys)
    assert done.returncode == 7, done.stderr
    assert "nothing was captured: the program never called cudaProfilerStart\n" in done.stderr


@pytest.mark.slow
@pytest.mark.nsys
def test_duration_ends_the_capture_and_the_program(nsys, tmp_path):
    captured = []
    for seconds in ("2", "9", "30"):  # from nsys's start on; a busy machine may not have begun the program by then
        words = ("-f", "-x", "--trace=nvtx", "-x", "-d", "-x", seconds, "--", *python(PROGRAM, tmp_path), "90")
        done = run(*words, cwd=tmp_path, NSYS=nsys)
        captured = ranges(tmp_path / "run.sqlite") if (tmp_path / "run.sqlite").exists() else []
        if captured:
            break
    assert captured == EVERYTHING
    assert done.returncode == 5 and (tmp_path / "saved").exists(), done.stderr  # it was waited for


@pytest.mark.slow
@pytest.mark.nsys
def test_one_step_alone(nsys, tmp_path):
    (tmp_path / "gpu_peaks.json").write_text("measured here")
    words = ("-f", "-x", "--trace=nvtx", "--step", "3", "-o", "runs/run", "--", *python(PROGRAM, tmp_path), "0.2")
    done = run(*words, cwd=tmp_path, NSYS=nsys)
    assert done.returncode == 7, done.stderr
    assert ranges(tmp_path / "runs" / "run.sqlite") == ["step 3", "layers.3"]
    assert (tmp_path / "runs" / "gpu_peaks.json").read_text() == "measured here"
    assert "runs/gpu_peaks.json: the measured peaks of this folder, for runs/run" in done.stderr


@pytest.mark.nsys
@pytest.mark.slow
def test_a_program_is_annotated_without_a_line(nsys, tmp_path):
    name = str(tmp_path / "run")
    words = ["--annotate", "-o", name, "-x", "--trace=nvtx", "--", sys.executable, "-c", PROGRAM_UNANNOTATED]
    done = run(*words, cwd=recipes.ROOT, NSYS=nsys)
    assert done.returncode == 0, done.stderr
    assert "annotated TinyTransformer: 14 modules, 2 blocks among them" in done.stderr
    assert {"step 0", "step 1", "layers.1", "layers.1 backward"} <= set(ranges(tmp_path / "run.sqlite"))


SCRUBBED = """
import nvprof_kit
print("planted-output")
with nvprof_kit.step(1), nvprof_kit.layer_range("layers.0"):
    pass
"""


@pytest.mark.every_nsys
def test_a_scrubbed_export_has_nothing_of_the_programs_surroundings_in_any_byte(nsys, tmp_path):
    folder = tmp_path / "planted-folder"
    folder.mkdir()
    words = ("-x", "--trace=nvtx", "--", *python(SCRUBBED, folder, "planted-argument"))
    done = run(*words, cwd=folder, NSYS=nsys, HF_TOKEN="planted-token")
    assert done.returncode == 0, done.stderr
    capture, copy = folder / "run.sqlite", tmp_path / "clean.sqlite"
    assert b"planted-token" in capture.read_bytes() and b"HF_TOKEN" in capture.read_bytes()
    nvprof_kit.scrub(capture, copy)
    assert b"planted" not in copy.read_bytes() and b"HF_TOKEN" not in copy.read_bytes()
    assert ranges(copy) == ranges(capture) == ["step 1", "layers.0"]
