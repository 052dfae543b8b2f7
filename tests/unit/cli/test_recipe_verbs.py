"""What the verbs that capture call their reports, and the completion of every shell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvprof_kit._capture.profile import program_name, report_name

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 3", "train"),
        ("torchrun --nproc-per-node 8 ./jobs/pre.train.py", "pre.train"),
        ("python3.11 -u -m package.train", "train"),
        ("python -m package.__main__", "package"),
        ("./serve.sh --port 80", "serve"),
        ("python -c print(1)", "python"),
    ],
)
def test_a_report_is_called_as_its_program(command: str, name: str) -> None:
    assert program_name(command.split()) == name
    then = time.strptime("2026-11-22 22:13:00", "%Y-%m-%d %H:%M:%S")
    assert report_name(command.split(), then) == f"{name}-20261122-221300"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvprof_kit"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "_NVPROF_KIT_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nvprof-kit" in done.stdout and "_NVPROF_KIT_COMPLETE" in done.stdout
