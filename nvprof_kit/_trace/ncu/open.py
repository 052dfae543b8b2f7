"""Open an ncu report of any page, version and locale as an `NcuReport`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nvprof_kit._trace.domains import DEFAULT
from nvprof_kit._trace.files.checks import AGAIN, DAY_NS
from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import DOMAIN

_REPORT = b"NVR\x00"
_DURATION = "gpu__time_duration"
_MOST = 1e24
"""More than any GPU counter reaches; the peak rate of one-bit operations is 1e16 per second."""


def open_ncu(path: str | Path, *, domain: str = DOMAIN) -> NcuReport:
    """Read an ncu report.

    Args:
        path: The raw or details page as CSV (``ncu --import FILE --page raw --csv``), or an ``.ncu-rep``; each also
            compressed as ``.xz``.
        domain: NVTX domain to take the ranges from; '' or ``default`` is the default domain.

    Raises:
        CaptureError: The file cannot be read, is another page, or contains no result.
        ToolError: An ``.ncu-rep`` needs the ncu-report package or an installed ncu.
    """
    path = Path(path)
    domain = "" if domain == DEFAULT else domain
    try:
        data = read_packed(path)
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not data:
        raise CaptureError(f"{path}: the file is empty (0 bytes); needed a raw or details page of ncu, or an .ncu-rep")
    if data.startswith(_REPORT):
        from nvprof_kit._trace.ncu.rep import read_rep

        with tempfile.TemporaryDirectory(prefix="nvprof-kit-") as folder:
            plain = Path(folder) / "report.ncu-rep"
            plain.write_bytes(data)
            report: NcuReport = read_rep(plain, domain, str(path))
            return _checked(report)
    from nvprof_kit._trace.ncu.csv import read_csv

    return _checked(read_csv(data.decode("utf-8-sig", errors="replace"), domain, str(path)))


def _checked(report: NcuReport) -> NcuReport:
    """Reject implausible values and units, and add warnings about duplicates.

    Raises:
        CaptureError: A value is negative or implausible, or the unit of a duration is not a time; the message has the
            metric.
    """
    for name in map(str, report.metrics):
        values = report.metrics[name].to_numpy()
        is_time = name.startswith(_DURATION)
        if is_time and report.units.get(name, "") not in ("ns", ""):
            raise CaptureError(f"{report.path}: {name} is in {report.units[name]!r}, which is no time; {AGAIN}")
        wrong = values[(values < 0) | (values > (DAY_NS if is_time else _MOST))]
        if len(wrong):
            raise CaptureError(f"{report.path}: {name} is {wrong[0]:g} in {len(wrong)} results; {AGAIN}")
    return replace(report, warnings=(*report.warnings, *_repeated(report)))


def _repeated(report: NcuReport) -> tuple[Issue, ...]:
    repeats = int(report.kernels.duplicated(["id", "pid", "kernel"]).sum())
    sentence = f"{repeats} of {len(report.kernels)} results stand there twice (ID and Process ID), and count twice"
    return (
        (Issue("repeated", "error", repeats / len(report.kernels), f"{sentence}; name each report once"),)
        if repeats
        else ()
    )


def together(reports: Sequence[NcuReport]) -> NcuReport:
    """Combine several reports, for example from runs that measured different kernels.

    Raises:
        CaptureError: Two reports have different units for the same metric.
    """
    import pandas as pd

    if len(reports) == 1:
        return reports[0]
    units: dict[str, str] = {}
    for report in reports:
        for name, unit in report.units.items():
            if units.setdefault(name, unit) != unit:
                raise CaptureError(f"{report.path}: {name} is in {unit or 'no unit'}, elsewhere in {units[name]}")
    merged = NcuReport(
        path=", ".join(report.path for report in reports),
        kernels=pd.concat([report.kernels for report in reports], ignore_index=True),
        metrics=pd.concat([report.metrics for report in reports], ignore_index=True),
        texts=pd.concat([report.texts for report in reports], ignore_index=True),
        units=units,
        warnings=tuple(warning for report in reports for warning in report.warnings),
    )
    repeats = any(report.kernels.duplicated(["id", "pid", "kernel"]).any() for report in reports)
    return merged if repeats else replace(merged, warnings=(*merged.warnings, *_repeated(merged)))
