"""The forms of ncu's results: its report, and its pages of any version and locale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit._trace.reader import Request, Source
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues, plural

_DURATION = "gpu__time_duration"
_MAX = 1e24
"""More than any GPU counter reaches; the peak rate of one-bit operations is 1e16 per second."""


class ReportReader:
    """An ``.ncu-rep``."""

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path is of this format."""
        return header.startswith(b"NVR\x00")

    def read(self, source: Source, request: Request) -> NcuReport:
        """Read a report.

        Raises:
            CaptureError: The report is damaged, newer than its reader, or contains no result.
            ToolError: Neither the ncu-report package nor ncu is installed.
        """
        from nvprof_kit._trace.ncu.rep import read_rep

        return _checked(read_rep(source.path, request.domain, str(source.named)))


class PageReader:
    """A page that ncu printed as CSV, with other output around it."""

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path may be of this format: a program's output can begin with anything."""
        return not path.is_dir()

    def read(self, source: Source, request: Request) -> NcuReport:
        """Read a page.

        Raises:
            CaptureError: The file has no page, another page, or one without results.
        """
        from nvprof_kit._trace.ncu.csv import read_csv

        text = read_packed(source.path).decode("utf-8-sig", errors="replace")
        return _checked(read_csv(text, request.domain, str(source.named)))


def _checked(report: NcuReport) -> NcuReport:
    """Refuse implausible durations, and leave out other implausible values: a metric that ncu computes from several
    passes can be negative where the passes differ.

    Raises:
        CaptureError: A duration is negative or longer than a day, or its unit is not a time; the message has the
            metric.
    """
    from nvprof_kit._trace.validate import DAY_NS, FILE_DAMAGED

    metrics: dict[str, Any] = {}
    warnings = []
    for name in map(str, report.metrics):
        values = report.metrics[name].to_numpy()
        is_time = name.startswith(_DURATION)
        if is_time and report.units.get(name, "") not in ("ns", ""):
            raise CaptureError(f"{report.path}: {name} is in {report.units[name]!r}, which is no time; {FILE_DAMAGED}")
        is_wrong = (values < 0) | (values > (DAY_NS if is_time else _MAX))
        if is_wrong.any():
            said = f"{name} is {values[is_wrong][0]:g} in {plural(int(is_wrong.sum()), 'result')}"
            if is_time:
                raise CaptureError(f"{report.path}: {said}; {FILE_DAMAGED}")
            metrics[name] = report.metrics[name].mask(is_wrong)
            warnings.append(f"{said}: left out")
    if not warnings:
        return report
    all_warnings = (*report.warnings, *as_issues("ncu-report", warnings))
    return replace(report, metrics=report.metrics.assign(**metrics), warnings=all_warnings)


def together(reports: Sequence[NcuReport]) -> NcuReport:
    """Combine several reports, for example from runs that measured different kernels, and warn of duplicates.

    Raises:
        CaptureError: Two reports have different units for the same metric.
    """
    import pandas as pd

    units: dict[str, str] = {}
    for report in reports:
        for name, unit in report.units.items():
            if units.setdefault(name, unit) != unit:
                raise CaptureError(f"{report.path}: {name} is in {unit or 'no unit'}, elsewhere in {units[name]}")
    kernels, metrics, texts = (
        pd.concat([getattr(report, table) for report in reports], ignore_index=True)
        for table in ("kernels", "metrics", "texts")
    )
    warnings = [warning for report in reports for warning in report.warnings]
    if repeats := int(kernels.duplicated(["id", "pid", "kernel"]).sum()):
        warnings.append(Issue.of("repeated:ncu", repeats / len(kernels), count=repeats, total=len(kernels)))
    invocations = reports[0].invocations if len(reports) == 1 else ()
    path = ", ".join(report.path for report in reports)
    return NcuReport(path, kernels, metrics, texts, units, tuple(warnings), invocations)
