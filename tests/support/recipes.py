"""Runs the verbs that capture, with a fake nsys that has the options of one release and does nothing."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.cli import NVPROF_KIT, environment, executable, execute, execute_here

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "nsys"

VERBS = {
    "profile": [*NVPROF_KIT, "profile", "-o", "run"],
    "ranks": [*NVPROF_KIT, "ranks", "profile", "-o", "run"],
    "ncu": [*NVPROF_KIT, "ncu", "profile", "-o", "run", "-l", "a"],
    **{verb: [*NVPROF_KIT, "session", verb] for verb in ("launch", "start", "stop", "status")},
}
"""The command line of each verb that runs a profiler; the report's name is ``run`` unless another follows."""

_ALL = "trace cuda-graph-trace cuda-memory-usage osrt-threshold sample cpuctxsw capture-range capture-range-end delay"
_ALL += " env-var nvtx-capture duration kill export output session session-new gpu-metrics-frequency"
_LAUNCH = "session session-new trace cuda-graph-trace cuda-memory-usage env-var osrt-threshold"
OPTIONS = {
    # what the recipes use of each release, as its help has it
    "2022.4": f"{_ALL} gpu-metrics-device",
    "2023.4": f"{_ALL} gpu-metrics-device python-nvtx-annotations",
    "2024.2": f"{_ALL} gpu-metrics-device python-functions-trace",
    "2026.4": f"{_ALL} gpu-metrics-devices python-functions-trace cuda-event-trace pytorch",
}


def stand_in(folder: Path, release: str) -> Path:
    """An executable ``nsys`` that prints the help of a release and runs nothing."""
    options = OPTIONS[release].split()
    launch = [*_LAUNCH.split(), *(name for name in options if name.startswith(("cuda-event", "python", "pytorch")))]
    lines = {
        "launch": launch,
        "start": [name for name in options if name not in launch or name.startswith("session")],
        "*": options,
    }
    refused = "launch) echo '(Deprecated) --sample= --cpuctxsw=' ;;&\n"
    cases = refused + "\n".join(
        f"{verb}) echo {' '.join(f'--{name}=' for name in names)} ;;" for verb, names in lines.items()
    )
    return executable(folder / f"nsys-{release}", f"#!/bin/bash\ncase $1 in\n{cases}\nesac\n")


def run(verb: str, *argv: str, cwd: Path, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of `VERBS`, or a recipe by its path from the folder of nsys, and wait for its end."""
    return execute(*VERBS.get(verb, [str(RECIPES / verb)]), *argv, cwd=cwd, timeout=timeout, **more)


def refuse(verb: str, *argv: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What a verb of `VERBS` says that runs no program, found out in this process."""
    return execute_here(*VERBS[verb][len(NVPROF_KIT) :], *argv, cwd=cwd, **more)


def dry_run(verb: str, *argv: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What a verb would run."""
    return refuse(verb, "--dry-run", *argv, cwd=cwd, **more)


def start(command: list[str], cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start a command in its own process group, as a shell does."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def wait_for(path: Path) -> str:
    """Wait until a file has text; returns the text."""
    assert until(lambda: path.exists() and path.read_text()), f"{path} stays empty"
    return path.read_text()


def wait_for_next(path: Path) -> None:
    """Wait until a program that writes a file again and again has gone through a whole round."""
    for _ in range(2):
        path.unlink()
        wait_for(path)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def end_all(name: str, value: str) -> None:
    """End every process with this in its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if f"{name}={value}".encode() in variables and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


def gone(pid: int, seconds: float = 20) -> bool:
    """Whether a process ends in time; otherwise it is killed."""
    ended = until(lambda: not alive(pid), seconds)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return ended


def ranges(path: Path) -> list[str]:
    """Texts of the ranges in an export, in the order of their start; fails where the file is not whole."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [
            text
            for (text,) in db.execute(
                "SELECT coalesce(event.text, string.value) FROM NVTX_EVENTS event "
                "LEFT JOIN StringIds string ON string.id = event.textId "
                "WHERE event.eventType IN (59, 60) ORDER BY event.start"
            )
            if text != "gc"  # Python's garbage collections come when they will
        ]


def python(code: str, folder: Path, *argv: str) -> list[str]:
    """The command line that runs this Python code."""
    program = folder / "program.py"
    program.write_text(code)
    return [sys.executable, str(program), *argv]
