"""What is done before a capture and with one that is to be given away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from nvprof_kit._results.checks import Checks

CAPTURES = (".sqlite", ".sqlite.xz", ".nsys-rep", ".nsys-rep.xz")
"""What the name of a capture of nsys ends in."""


def doctor(*captures: str | Path, command: Sequence[str] = ()) -> Checks:
    """Say beforehand why a profile would fail or mislead, or afterwards whether a capture can be trusted.

    Args:
        captures: nsys captures to examine. Without any, this machine is: GPU, driver, nsys, ncu, permissions, other
            profilers, disk.
        command: With the machine, also the Python, torch and script that this command runs. It is not run.

    Raises:
        CaptureError: A file is no nsys capture.
    """
    from nvprof_kit._results.checks import Checks

    if captures:
        from nvprof_kit._analysis.doctor import examine_captures
        from nvprof_kit._trace.nsys.health import read_health

        strangers = [str(one) for one in captures if not str(one).endswith(CAPTURES)]
        if strangers:
            raise CaptureError(f"{strangers[0]}: no nsys capture; needed .sqlite or .nsys-rep, each also packed as .xz")
        return Checks(
            examine_captures([read_health(Path(one)) for one in captures]), sources=tuple(map(Path, captures))
        )
    from nvprof_kit._capture.doctor import examine_machine
    from nvprof_kit._capture.machine import read_machine

    return Checks({"machine": examine_machine(read_machine(command))})


def scrubbed_name(capture: str | Path) -> Path:
    """What the scrubbed copy of an export is called unless it is said: ``NAME.scrubbed.sqlite``.

    Raises:
        UsageError: It is no ``.sqlite`` and no ``.sqlite.xz``.
    """
    capture = Path(capture)
    name, dot, suffix = capture.name.partition(".sqlite")
    if not dot:
        raise UsageError(
            f"{capture}: only an .sqlite export can be scrubbed; export it: nsys export -t sqlite {capture}"
        )
    return capture.with_name(f"{name}.scrubbed{dot}{suffix}")


def scrub(
    capture: str | Path, target: str | Path | None = None, *, also: str | None = None, force: bool = False
) -> Mapping[str, int]:
    """Copy an nsys export without environment variables, command line, machine, printed output and other processes.

    Args:
        capture: An ``.sqlite`` or an ``.sqlite.xz``. Times, kernels and ranges stay as they are.
        target: The copy; None for ``NAME.scrubbed.sqlite``.
        also: Replace every text in which this regular expression is found, such as a project's name.
        force: Overwrite the target.

    Returns:
        How much was taken out, by what it was.

    Raises:
        UsageError: The capture is of another kind or not there, or the target exists.
        CaptureError: The capture is damaged.
    """
    from nvprof_kit._trace.nsys.scrub import ScrubOptions
    from nvprof_kit._trace.nsys.scrub import scrub as write_copy

    capture, usual = Path(capture), scrubbed_name(capture)
    if not capture.is_file():
        raise UsageError(f"{capture}: no such file")
    target = usual if target is None else Path(target)
    if target.exists() and (not force or target.samefile(capture)):
        hint = "the copy needs a name of its own" if target.samefile(capture) else "overwrite it with --force"
        raise UsageError(f"{target} exists; {hint}, or choose another with -o")
    return write_copy(capture, target, ScrubOptions(also))
