"""Run a Python program under the embedded recorder.

``python -u train.py`` becomes ``python -u -m nvprof_kit._capture.recorder.runner SETTINGS train.py``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from nvprof_kit._capture.recorder.launchers import parse_launch
from nvprof_kit._capture.recorder.record import RecordOptions, check_path
from nvprof_kit._capture.recorder.recording import Limits
from nvprof_kit._instrument.loop.schedule import Schedule
from nvprof_kit.errors import ToolError, UsageError

ALL = Limits()

RUNNER = "nvprof_kit._capture.recorder.runner"

_PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
_PROBE = (
    "import sys, importlib.util as u\n"
    "sys.exit(','.join(n for n in ('torch', 'nvprof_kit') if u.find_spec(n) is None) or None)"
)


class PythonCommand(NamedTuple):
    """A parsed Python command line.

    Attributes:
        interpreter: The interpreter and its options: ``python3 -u -X dev``.
        target: The program: ``train.py``, ``-m package.train`` or ``-c code``.
        arguments: The program's ``sys.argv[1:]``.
    """

    interpreter: tuple[str, ...]
    target: tuple[str, ...]
    arguments: tuple[str, ...]


def parse_python(command: Sequence[str]) -> PythonCommand:
    """Parse a Python command line by the interpreter's rules.

    Raises:
        UsageError: The command does not start with a Python interpreter, or has no program.
    """
    if not command:
        raise UsageError("no program to record; needed: nvprof-kit record -- python train.py")
    if not _PYTHON.fullmatch(Path(command[0]).name):
        raise UsageError(
            f"{command[0]} is not a Python interpreter, and only Python programs can be recorded: use `python …`, "
            "`torchrun …` or `accelerate launch …`, or put `with nvprof_kit.record('run.json.gz'):` into the program"
        )
    remaining = list(command[1:])
    options: list[str] = []
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            options += [word, *(remaining[:1] if word == "--check-hash-based-pycs" else [])]
            remaining = remaining[1:] if word == "--check-hash-based-pycs" else remaining
            continue
        cluster = re.fullmatch(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.DOTALL)  # flags, and an option that takes a value
        assert cluster is not None
        flags, letter, value = cluster.groups()
        options += [f"-{flags}"] if flags else []
        if letter and not value:
            value = remaining.pop(0) if remaining else ""
        if letter in ("c", "m"):
            return PythonCommand((command[0], *options), (f"-{letter}", value), tuple(remaining))
        options += [f"-{letter}", value] if letter else []
    else:
        word = "-"
    if word == "-":
        raise UsageError(f"`{' '.join(command)}` names no program to record; needed a script, -m module or -c code")
    return PythonCommand((command[0], *options), (word,), tuple(remaining))


def runner_argv(path: Path, options: RecordOptions, command: PythonCommand, limits: Limits = ALL) -> list[str]:
    """The command line that runs the program under the recorder, in the same interpreter with the same options."""
    settings = json.dumps({"path": os.path.abspath(path), **vars(options), "limits": vars(limits)})
    return [*command.interpreter, "-m", RUNNER, settings, *command.target, *command.arguments]


def record_program(
    path: Path,
    options: RecordOptions,
    command: Sequence[str],
    limits: Limits = ALL,
    *,
    force: bool = False,
    environ: Mapping[str, str] | None = None,
) -> NoReturn:
    """Replace this process with the recorded program, so that signals and exit status are the program's.

    Under ``torchrun`` or ``accelerate launch``, each rank writes a trace, ``run.rank3.json.gz``.

    Args:
        path: Trace to write.
        options: What to record.
        command: The program's command line, starting with a Python interpreter or a launcher.
        limits: Which part of the program to record.
        force: Replace existing traces.
        environ: Additional environment variables for the program.

    Raises:
        UsageError: The command is not a Python program, its script does not exist, or the trace cannot be written or
            exists.
        ToolError: The interpreter does not exist, or lacks torch or this package.
    """
    path = path.absolute()
    check_path(path)
    if limits.schedule:
        Schedule.parse(limits.schedule)
    launch = parse_launch(command)
    parsed = parse_python(command if launch is None else launch.program)
    if not force:  # nor are those of ranks and windows replaced: run.rank0.json.gz, run.1.json.gz
        stem, dot, suffix = path.name.partition(".json")
        pattern = re.compile(rf"{re.escape(stem)}(\.rank\d+)?(\.\d+)?{re.escape(dot + suffix)}")
        existing = sorted(file.name for file in path.parent.iterdir() if pattern.fullmatch(file.name))
        if existing:
            raise UsageError(
                f"{path.with_name(existing[0])} exists; choose another name with -o, or replace it with --force"
            )
    if len(parsed.target) == 1 and not os.path.exists(parsed.target[0]):
        raise UsageError(f"{parsed.target[0]}: no such script to record")
    interpreter = shutil.which(parsed.interpreter[0])
    if interpreter is None:
        raise ToolError(f"{parsed.interpreter[0]}: no such interpreter on PATH")
    # the program's interpreter may differ from this one
    probe = subprocess.run([*parsed.interpreter, "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        python, missing = parsed.interpreter[0], probe.stderr.strip().rpartition("\n")[2]
        package = {"torch": "torch", "nvprof_kit": "nvprof-kit", "torch,nvprof_kit": "torch nvprof-kit"}.get(missing)
        if package is None:
            raise ToolError(f"{python} does not start: {missing}")
        raise ToolError(f"{python} has no {missing.replace(',', ' and no ')}; {python} -m pip install {package}")
    argv = runner_argv(path, options, parsed, limits)
    if launch is not None:
        argv = launch.command(argv)
        interpreter = shutil.which(argv[0]) or argv[0]
    sys.stdout.flush()
    os.execve(interpreter, argv, {**os.environ, **(environ or {})})
