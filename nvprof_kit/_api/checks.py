"""Checks before and after a capture, and removing private data from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit._findings import by_severity
from nvprof_kit._trace.files.kinds import NEEDED, has_tables
from nvprof_kit.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.checks import Checks

_TRACE_SUFFIXES = (".json", ".json.gz", ".json.xz")
_SUFFIXES = (".sqlite", ".sqlite.xz", ".nsys-rep", ".nsys-rep.xz", *_TRACE_SUFFIXES)
"""Suffixes of PyTorch's traces, and of all captures."""


def is_capture(path: str | Path) -> bool:
    """Whether a path has the name of a capture, or is a folder of nsys's tables."""
    return str(path).endswith(_SUFFIXES) or has_tables(Path(path))


def doctor(*captures: str | Path, command: Sequence[str] = (), measure: str | Path | None = None) -> Checks:
    """Check this machine before profiling, or a capture after it, for problems that make a profile fail or mislead.

    Args:
        captures: Captures to check. Without captures, the machine is checked: GPU, driver, nsys, ncu, permissions,
            other profilers, free disk space.
        command: When checking the machine, also check the Python, torch and script of this command. The command is not
            executed.
        measure: When checking the machine, also measure its first GPU, for 10 s: large matrix products and a large
            copy. The figures are left in this folder as ``gpu_peaks.json``, and are the peaks of captures beside it.

    Raises:
        CaptureError: A file is not a capture.
        ToolError: There is no GPU to measure, or no PyTorch.
        UsageError: A capture is to be measured, or the folder cannot be written to.
    """
    from nvprof_kit._analysis.checks import Checks

    if captures:
        if measure is not None:
            raise UsageError("--measure measures this machine, not a capture; name one or the other")
        from nvprof_kit._analysis.doctor import examine_captures, examine_issues, examine_trace
        from nvprof_kit._api.capture import Capture
        from nvprof_kit._trace.nsys.health import read_health
        from nvprof_kit._trace.open import open_capture

        if strangers := [capture for capture in captures if not is_capture(capture)]:
            raise CaptureError(f"{strangers[0]}: not a capture; needed {NEEDED}")
        paths = [str(Path(capture)) for capture in captures]  # "./run.sqlite" is run.sqlite, as readers say
        findings_by_path, layers_by_path, health = {}, {}, []
        for path in paths:
            capture = Capture(path)
            layers_by_path[path] = capture.layers()
            if path.endswith(_TRACE_SUFFIXES):
                findings_by_path[path] = examine_trace(open_capture(path))
            else:
                health.append(read_health(Path(path), capture._operations(cpu_only=True).trace))
        findings_by_path |= examine_captures(health)
        for path, layers in layers_by_path.items():
            findings = [*findings_by_path[path], *examine_issues(layers.warnings)]
            has_ranges = layers.summary.layers and "structure" not in layers.summary.by_how
            if has_ranges and not path.endswith(_TRACE_SUFFIXES):  # of another NVTX domain
                findings = [each for each in findings if (each.rule, each.severity) != ("ranges", "warning")]
            findings_by_path[path] = by_severity(findings)
        return Checks(findings_by_path, sources=tuple(map(Path, paths)))
    from nvprof_kit._capture.doctor import examine_machine
    from nvprof_kit._capture.machine import read_machine

    measured = []
    if measure is not None:
        from nvprof_kit._capture.ceilings import measure_peaks

        measured = [measure_peaks(measure)]
    return Checks({"machine": [*examine_machine(read_machine(command)), *measured]})


def scrubbed_name(capture: str | Path) -> Path:
    """The default name of the scrubbed copy of an export: ``NAME.scrubbed.sqlite``.

    Raises:
        UsageError: The suffix is neither ``.sqlite`` nor ``.sqlite.xz``.
    """
    capture = Path(capture)
    name, dot, suffix = capture.name.partition(".sqlite")
    if not dot:
        from nvprof_kit._trace.nsys.scrub import commands_to_scrub

        raise UsageError.of("not-an-export", capture=capture, commands=commands_to_scrub(capture))
    return capture.with_name(f"{name}.scrubbed{dot}{suffix}")


def scrub(capture: str | Path, target: str | Path | None = None, *, also: str | None = None) -> Mapping[str, int]:
    """Copy an nsys export without private data.

    Removed are environment variables, the command line, the host name, captured output, and other processes.

    Args:
        capture: An ``.sqlite`` or ``.sqlite.xz``. Times, kernels and ranges are kept.
        target: Path of the copy; None for ``NAME.scrubbed.sqlite`` in the capture's folder.
        also: Replace each text that matches this regular expression, such as a project name.

    Returns:
        The number of removed entries by kind.

    Raises:
        UsageError: The capture does not exist or is not an export, or the target exists.
        CaptureError: The capture is damaged.
    """
    from nvprof_kit._trace.nsys.scrub import scrub as write_copy

    capture, usual = Path(capture), scrubbed_name(capture)
    if not capture.is_file():
        raise UsageError(f"{capture}: no such file")
    target = usual if target is None else Path(target)
    if target.exists():
        problem = "is the capture itself;" if target.samefile(capture) else "exists; remove it, or"
        raise UsageError(f"{target} {problem} choose another name with -o")
    return write_copy(capture, target, also)
