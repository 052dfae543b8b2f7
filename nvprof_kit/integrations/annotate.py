"""Annotation without code changes: ``NVPROF_KIT_ANNOTATE=1`` with the folder `site` on ``PYTHONPATH``.

Python then calls `install` in the program and in its Python child processes. Once torch is imported, module calls are
watched (`integrations.watch`). This module imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nvprof_kit._instrument.flops.count import COUNT_VARIABLE, count_second_step
from nvprof_kit._instrument.patches import after_import

ANNOTATE_VARIABLE = "NVPROF_KIT_ANNOTATE"
"""The environment variable that annotates the models of a program."""

RECORD_VARIABLE = "NVPROF_KIT_RECORD"
"""The environment variable with the settings with which a process records itself."""

FIRST_PROCESS_VARIABLE = "NVPROF_KIT_ANNOTATE_FIRST"
"""The environment variable with the id of the first process; its children that call no module (launchers, compilers)
report nothing."""

SITE = Path(__file__).parent / "site"
"""The folder to put on ``PYTHONPATH``."""


def environment(
    environ: Mapping[str, str] | None = None, *, annotate: bool = True, count: str = "", record: str = ""
) -> dict[str, str]:
    """The environment variables that annotate, count or record a program without a change of it.

    Args:
        environ: The current environment; `os.environ` by default.
        annotate: Whether to annotate the models: ``NVPROF_KIT_ANNOTATE``.
        count: File to count the second step into: ``NVPROF_KIT_COUNT``.
        record: Settings with which it is recorded: ``NVPROF_KIT_RECORD``.

    Returns:
        These variables and ``PYTHONPATH``, whose existing entries are kept at the end; none if nothing is to be done.
    """
    environ = os.environ if environ is None else environ
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != str(SITE)]
    variables = {ANNOTATE_VARIABLE: "1" if annotate else "", COUNT_VARIABLE: count, RECORD_VARIABLE: record}
    variables = {name: value for name, value in variables.items() if value}
    return {**variables, "PYTHONPATH": os.pathsep.join([str(SITE), *folders])} if variables else {}


def install() -> None:
    """Record this process, count a step and watch for models once it imports torch; does not raise."""
    try:
        if os.environ.get(COUNT_VARIABLE):
            after_import("torch", lambda _torch: count_second_step())
        if os.environ.get(ANNOTATE_VARIABLE, "").strip().lower() in ("1", "on", "true", "yes"):
            os.environ.setdefault(FIRST_PROCESS_VARIABLE, str(os.getpid()))
            after_import("torch", lambda _torch: _start())
        if os.environ.get(RECORD_VARIABLE):  # last: the first call of a module begins a recording, then is looked at
            after_import("torch", lambda _torch: _record())
    except Exception as error:  # the program must run without annotation
        say(f"nothing is annotated ({type(error).__name__}: {error})")


def say(text: str) -> None:
    """Print a line to stderr."""
    with suppress(OSError, ValueError):
        print(f"nvprof-kit annotate: {text}", file=sys.stderr, flush=True)


def _record() -> None:
    from nvprof_kit._capture.recorder.recording import begin_recording

    begin_recording(RECORD_VARIABLE)


def _start() -> None:
    from nvprof_kit._instrument import session

    if session.mode != "off":
        from nvprof_kit.integrations.watch import Watch

        Watch(say, is_first=os.environ.get(FIRST_PROCESS_VARIABLE) == str(os.getpid()))
