"""Multi-rank launchers: build the command that runs each rank under the recorder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nvprof_kit.errors import ToolError, UsageError


class Launcher(NamedTuple):
    """A launcher with options that are parsed by the parser of its package.

    Attributes:
        module: The module for ``python -m``.
        parser: The function that creates its parser, ``module:name``.
        without_python: Its option to run any program instead of a Python script.
    """

    module: str
    parser: str
    without_python: str


TORCHRUN = Launcher("torch.distributed.run", "torch.distributed.run:get_args_parser", "--no-python")
ACCELERATE = Launcher("accelerate.commands.launch", "accelerate.commands.launch:launch_command_parser", "--no_python")

BY_MODULE = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launcher": TORCHRUN,
    "accelerate.commands.launch": ACCELERATE,
}

OTHERS = ("deepspeed", "deepspeed.launcher.runner", "torch.distributed.launch", "colossalai", "mpirun", "srun")
"""Launchers without support for recording their ranks."""

_PARSE = """
import importlib, json, sys
module, _, name = sys.argv[1].partition(":")
given = getattr(importlib.import_module(module), name)().parse_args(sys.argv[2:])
print(json.dumps([len(given.training_script_args), bool(given.module), bool(given.no_python)]))
"""


class Launch(NamedTuple):
    """A parsed launcher command line.

    Attributes:
        interpreter: The Python for the launcher and the ranks.
        launcher: The launcher.
        options: Its options, except those that select the ranks' program.
        program: The ranks' program, as a Python command line.
    """

    interpreter: str
    launcher: Launcher
    options: tuple[str, ...]
    program: tuple[str, ...]

    def command(self, rank: Sequence[str]) -> list[str]:
        """The launcher's command line with another program for the ranks."""
        return [self.interpreter, "-m", self.launcher.module, *self.options, self.launcher.without_python, *rank]


def parse_launch(command: Sequence[str]) -> Launch | None:
    """Parse ``torchrun …``, ``accelerate launch …`` and ``python -m`` with their modules; None for other commands.

    Raises:
        UsageError: The launcher's parser rejects its options, or the launcher is unsupported.
        ToolError: The launcher is not installed.
    """
    arguments = list(command)
    name = Path(arguments[0]).name if arguments else ""
    if name == "torchrun":
        return _parsed(_python_of(arguments[0]), TORCHRUN, arguments[1:])
    if name == "accelerate" and arguments[1:2] == ["launch"]:
        return _parsed(_python_of(arguments[0]), ACCELERATE, arguments[2:])
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] and name.startswith("python") else ""
    if module in BY_MODULE and arguments.index("-m") == 1:
        return _parsed(arguments[0], BY_MODULE[module], arguments[3:])
    if name in OTHERS or module in OTHERS:
        raise UsageError(
            f"{module or name} starts the ranks itself and record cannot reach them; put "
            "`with nvprof_kit.record(f'run.rank{rank}.json.gz'):` into the program, or start it by torchrun"
        )
    return None


def _python_of(script: str) -> str:
    """The interpreter in the first line of a package's script."""
    path = shutil.which(script)
    if path is None:
        raise ToolError(f"{script}: no such program on PATH")
    with open(path, "rb") as file:
        first = file.readline(4096).decode(errors="replace").strip()
    interpreter = first.removeprefix("#!").strip()
    return interpreter if first.startswith("#!") and shutil.which(interpreter) else sys.executable


def _parsed(interpreter: str, launcher: Launcher, arguments: list[str]) -> Launch:
    run = [interpreter, "-c", _PARSE, launcher.parser, *arguments]
    try:
        process = subprocess.run(run, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolError(f"{interpreter} does not start: {error.strerror}") from None
    if process.returncode != 0:
        message = process.stderr.strip().rpartition("\n")[2].removeprefix("-c: error: ")
        kind = UsageError if process.returncode == 2 else ToolError
        raise kind(f"{launcher.module}: {message or 'refuses its options'}")
    behind, module, no_python = json.loads(process.stdout.strip().rpartition("\n")[2])
    program_index = len(arguments) - behind - 1
    launcher_arguments = [
        word for word in arguments[:program_index] if word not in ("-m", "--module", "--no-python", "--no_python")
    ]
    rank = (
        [*arguments[program_index:]]
        if no_python
        else [interpreter, "-u", *(["-m"] if module else []), *arguments[program_index:]]
    )
    return Launch(interpreter, launcher, tuple(launcher_arguments), tuple(rank))
