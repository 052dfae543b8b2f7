"""What the verbs that capture call their reports, and the completion of every shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*words: str, **environment: str) -> str:
    command = [sys.executable, "-m", "nvprof_kit", *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 8 ./jobs/pre.train.py", "pre.train"),
        ("python3.11 -u -m package.train", "train"),
        ("python -m package.__main__", "package"),
        ("./serve.sh --port 80", "serve"),
        ("python -c print(1)", "python"),
    ],
)
def test_a_report_is_called_as_its_program(command: str, name: str) -> None:
    assert re.search(rf"--output={re.escape(name)}-\d{{8}}-\d{{6}} ", run("profile", "-n", "--", *command.split()))


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_has_its_script(shell: str) -> None:
    assert "_NVPROF_KIT_COMPLETE" in run(_NVPROF_KIT_COMPLETE=f"{shell}_source")
