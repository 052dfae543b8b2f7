"""Runs the command line in this process, and commands as processes of their own."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from nvprof_kit._cli import main

ROOT = Path(__file__).parents[2]
NVPROF_KIT = [sys.executable, "-m", "nvprof_kit"]
"""The command line as a process of its own."""

_LAUNCHERS = ("RANK", "LOCAL_RANK", "SLURM_", "OMPI_", "PMI", "NVPROF_KIT_SCHEDULE", "NVPROF_KIT_RUN")


def run(*words: object) -> int:
    """The exit status of ``nvprof-kit WORDS``; what it prints is in the fixture ``capsys``."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def environment(**more: str) -> dict[str, str]:
    """The tests' environment without what a launcher would have set, with this tree on Python's path."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**without, "PYTHONPATH": paths, **more}


def execute_here(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What ``nvprof-kit WORDS`` prints in a folder, in this process: for what neither runs a program nor ends one."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    with (
        mock.patch.dict(os.environ, environment(**more), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(cwd)
        try:
            status = run(*words)
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def execute(
    *command: object, cwd: Path | None = None, stdin: str = "", timeout: float = 300, check: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in `environment` to its end; with `check`, fail with what it said if its status is not 0."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**more),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def executable(path: Path, script: str) -> Path:
    """Write a script that can be run, such as a stand-in for a tool."""
    path.write_text(script)
    path.chmod(0o755)
    return path


def torchrun(
    ranks: int, *words: object, cwd: Path, check: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, or what ``--no-python`` in front of it is, on some ranks of this machine.

    A process of PyTorch's gloo aborts as it ends in a few of some thousand runs. Where one does, what the run wrote is
    deleted, and the program runs again.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    before = set(cwd.rglob("*"))
    for _ in range(3):
        done = execute(*launch, *words, cwd=cwd, OMP_NUM_THREADS="1", **more)
        if done.returncode == 0 or "terminate called without an active exception" not in done.stdout + done.stderr:
            break
        for path in sorted(set(cwd.rglob("*")) - before, reverse=True):  # a folder's files before the folder
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
