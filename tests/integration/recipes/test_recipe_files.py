"""The shell recipes: files of at most twenty lines; those of nsys run under real releases of it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import executable, execute
from support.recipes import RECIPES, python, ranges, run, start, wait_for, wait_for_next

SCRIPTS = sorted(RECIPES.parent.glob("*/*.sh"))
PROGRAM = """
import pathlib, sys, time
import nvprof_kit
with nvprof_kit.record(schedule=None) as profiling:
    for number in range(4):
        with nvprof_kit.step(number), nvprof_kit.layer_range(f"layers.{number}"):
            time.sleep(0.01)
        profiling.step()
sys.exit(7)
"""
STEPS = [text for number in range(4) for text in (f"step {number}", f"layers.{number}")]


def without_cuda(folder: Path) -> str:
    """A preset for a machine without a GPU."""
    preset = folder / "nvtx"
    preset.write_text("# ranges alone\n--trace=nvtx\n--sample=none\n--cpuctxsw=none\n")
    return str(preset)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_is_read_at_a_glance(script):
    lines = script.read_text().splitlines()
    assert len(lines) <= 20 and os.access(script, os.X_OK)
    comment = lines[1 : next(number for number, line in enumerate(lines) if line.startswith("set -"))]
    assert comment and all(line.startswith("# ") for line in comment)
    assert any(script.name in line for line in comment), "an example"


@pytest.mark.every_nsys
@pytest.mark.nsys
@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("profile.sh", {}, {"run": STEPS}),
        ("step.sh", {"STEP": "2"}, {"run": STEPS[4:6]}),
        ("step.sh", {"RANGE": "layers.1@nvprof_kit"}, {"run": STEPS[3:4]}),
        ("schedule.sh", {"SCHEDULE": "2:3"}, {"run": ["window", *STEPS[4:6]]}),
        ("ranks.sh", {"RANKS": "1 3", "RANK": "3"}, {f"run-{os.uname().nodename}-rank3": STEPS}),
        ("ranks.sh", {"RANKS": "1 3", "RANK": "13"}, {}),
    ],
)
def test_a_recipe_under_nsys(nsys, name, variables, expected, tmp_path):
    program = python(PROGRAM, tmp_path)
    done = run(name, *program, cwd=tmp_path, NSYS=nsys, PRESET=without_cuda(tmp_path), **variables)
    assert done.returncode == 7, done.stderr
    assert {path.stem: ranges(path) for path in tmp_path.glob("*.sqlite")} == expected


@pytest.mark.nsys
def test_a_session(nsys, tmp_path):
    loop = "import nvprof_kit, time, pathlib\nfor number in range(100_000):\n"
    loop += "    with nvprof_kit.step(number): time.sleep(0.01)\n    pathlib.Path('began').write_text('yes')\n"
    variables = {"NSYS": nsys, "SESSION": f"recipe-{os.getpid()}", "PRESET": without_cuda(tmp_path)}
    running = start([str(RECIPES / "launch.sh"), *python(loop, tmp_path)], tmp_path, **variables)
    try:
        wait_for(tmp_path / "began")
        for report in ("first", "second"):
            assert run("start.sh", cwd=tmp_path, OUTPUT=report, **variables).returncode == 0
            wait_for_next(tmp_path / "began")
            done = run("stop.sh", cwd=tmp_path, **variables)
            assert done.returncode == 0, done.stdout + done.stderr
            assert any(text.startswith("step ") for text in ranges(tmp_path / f"{report}.sqlite"))
    finally:
        end = [nsys, "shutdown", f"--session={variables['SESSION']}", "--kill=sigkill"]
        subprocess.run(end, capture_output=True, check=False)
        running.communicate(timeout=60)


@pytest.mark.every_nsys
@pytest.mark.nsys
@pytest.mark.parametrize("preset", sorted(path.name for path in (RECIPES / "presets").iterdir()))
def test_a_preset_has_the_options_of_the_installed_nsys(nsys, preset, tmp_path):
    """Each that ``profile`` takes; between them ``launch`` and ``start`` take the same."""
    printed = {
        verb: run("preset.sh", verb, preset, cwd=tmp_path, NSYS=nsys).stdout.split()
        for verb in ("profile", "launch", "start")
    }
    assert {"--trace=cuda,nvtx", "--sample=none"} <= {*map(_plain, printed["profile"])}
    assert sorted({*printed["launch"], *printed["start"]}) == sorted(printed["profile"])


def _plain(option: str) -> str:
    return option.replace("cuda,nvtx,osrt", "cuda,nvtx")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ENGINE": "docker"}, ["--gpus=all", "--ulimit=memlock=-1", "--cap-add=SYS_ADMIN", "--network=host"]),
        ({"ENGINE": "docker", "GPUS": "0,1"}, ['--gpus="device=0,1"', "--shm-size=16g", "--workdir={here}"]),
        ({"ENGINE": "podman", "GPUS": "2"}, ["--device=nvidia.com/gpu=2", "--security-opt=seccomp=unconfined"]),
        ({"ENGINE": "podman", "GPUS": "", "MORE": "-v /a:/b"}, ["--init", "--interactive", "-v", "/a:/b"]),
        ({"ENGINE": "apptainer"}, ["exec", "--nv", "--bind={recipes}:/recipes:ro", "--bind={here}:{here}"]),
    ],
)
def test_the_command_of_a_container(variables, words, tmp_path):
    executable(tmp_path / variables["ENGINE"], '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("container.sh", "nsys", "status", cwd=tmp_path, PATH=path, IMAGE="image:1", **variables)
    printed = done.stdout.splitlines()
    places = {"here": str(tmp_path), "recipes": str(RECIPES.parent)}
    assert done.returncode == 0 and printed[-3:] == ["image:1", "nsys", "status"]
    assert {word.format(**places) for word in words} <= {*printed}
    has_gpus = variables["ENGINE"] != "apptainer" and variables.get("GPUS") != ""
    assert any(word.startswith(("--gpus", "--device")) for word in printed) == has_gpus


# this machine's root below a layer that takes what is written; limits that any user may set
CONTAINER = {"ENGINE": "podman", "IMAGE": "/:O", "GPUS": ""}


LIMITS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]


PROGRAM_CONTAINER = """
import os, pathlib, sys, time
import nvprof_kit
with nvprof_kit.step(2), nvprof_kit.layer_range("layers.2"):
    time.sleep(0.01)
print(pathlib.Path("/recipes/nsys/profile.sh").exists(), sys.stdin.readline().strip(), os.getcwd(), flush=True)
time.sleep(0.5)
pathlib.Path("ready").write_text("yes")
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which podman starts a container here."""
    if shutil.which("podman") is None:
        pytest.skip("no podman")
    config = tmp_path_factory.mktemp("podman") / "containers.conf"
    config.write_text('[engine]\nruntime = "runc"\n')
    for choice in ({}, {"CONTAINERS_CONF": str(config)}):
        tried = ["podman", "run", "--rm", "--init", "--network=host", *LIMITS, "--rootfs", "/:O", "true"]
        done = subprocess.run(tried, env={**os.environ, **choice}, capture_output=True, check=False, timeout=60)
        if done.returncode == 0:
            return choice
    pytest.skip("podman may not start a container here")


def inside(nsys: str, folder: Path, pause: str) -> tuple[list[str], dict[str, str]]:
    """The command that profiles the program in a container, and its environment."""
    (folder / "program.py").write_text(PROGRAM_CONTAINER)
    (folder / "code").symlink_to(RECIPES.parents[1])  # MORE is words, and the path of a checkout may have blanks
    more = [*LIMITS, f"--env=NSYS={nsys}", f"--env=PYTHONPATH={folder}/code", "--rootfs"]
    profile = [sys.executable, "-m", "nvprof_kit", "profile", "-o", "run", "-x", "--trace=nvtx", "--"]
    command = [str(RECIPES / "container.sh"), *profile, sys.executable, "program.py", pause]
    return command, {**CONTAINER, "MORE": " ".join(more)}


@pytest.mark.nsys
def test_a_profile_in_a_container(nsys, engine, tmp_path):
    command, variables = inside(nsys, tmp_path, "0")
    done = execute(*command, cwd=tmp_path, stdin="words\n", **engine, **variables)
    assert done.returncode == 7, done.stderr
    assert f"True words {tmp_path}" in done.stdout
    assert ranges(tmp_path / "run.sqlite") == ["step 2", "layers.2"]


@pytest.mark.nsys
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_container_that_is_interrupted(nsys, engine, number, tmp_path):
    command, variables = inside(nsys, tmp_path, "100")
    running = start(command, tmp_path, **engine, **variables)
    wait_for(tmp_path / "ready")
    running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 128 + number, said
    assert ranges(tmp_path / "run.sqlite")[:1] == ["step 2"]
