"""recipes/nsys/container.sh in a real container: podman over this machine's own files, which needs no image.

Skipped where podman is missing or may not start a container. The commands for docker and apptainer
are in test_recipe_files.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.recipes import RECIPES, environment, ranges, start, wait_for

# this machine's root below a layer that takes what is written; limits that any user may set
CONTAINER = {"ENGINE": "podman", "IMAGE": "/:O", "GPUS": ""}
LIMITS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]

PROGRAM = """
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
    (folder / "program.py").write_text(PROGRAM)
    more = [*LIMITS, f"--env=NSYS={nsys}", f"--env=PYTHONPATH={RECIPES.parents[1]}", "--rootfs"]
    profile = [sys.executable, "-m", "nvprof_kit", "profile", "-o", "run", "-t", "nvtx", "--"]
    command = [str(RECIPES / "container.sh"), *profile, sys.executable, "program.py", pause]
    return command, {**CONTAINER, "MORE": " ".join(more)}


@pytest.mark.nsys
def test_a_profile_in_a_container(nsys: str, engine: dict[str, str], tmp_path: Path) -> None:
    command, variables = inside(nsys, tmp_path, "0")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(**engine, **variables),
        input="words\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 7, done.stderr
    assert f"True words {tmp_path}" in done.stdout
    assert ranges(tmp_path / "run.sqlite") == ["step 2", "layers.2"]


@pytest.mark.nsys
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_container_that_is_interrupted(
    nsys: str, engine: dict[str, str], number: signal.Signals, tmp_path: Path
) -> None:
    command, variables = inside(nsys, tmp_path, "100")
    running = start(command, tmp_path, **engine, **variables)
    wait_for(tmp_path / "ready")
    running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 128 + number, said
    assert ranges(tmp_path / "run.sqlite")[:1] == ["step 2"]
