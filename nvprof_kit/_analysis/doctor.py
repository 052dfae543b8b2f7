"""Checks whether a capture is reliable: takes facts about how it was recorded, and returns findings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from nvprof_kit._findings import Finding, by_severity, checked, of_case
from nvprof_kit._trace.nsys.health import CaptureHealth
from nvprof_kit._trace.nsys.read import LIBRARY
from nvprof_kit._trace.nsys.scrub import commands_to_scrub, secret_names
from nvprof_kit._trace.nsys.warnings import GUESS
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue, in_order, listing
from nvprof_kit.names import DOMAIN, LAYER_PHASES

OVERHEAD_SHARE = 0.01
"""Minimum share of profiler overhead in the window for a finding."""

LOST_SHARE = 0.01
"""Minimum share of kernel launches without a recorded kernel for a lossy capture."""

LONG_NS = 60_000_000_000
"""Minimum duration of a long capture."""

_KERNELS, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_EXTRAS = {"CUDA_GPU_MEMORY_USAGE_EVENTS": ("allocations", "memory"), "GPU_METRICS": ("GPU metrics", "metrics")}
"""Tables that only some commands read, their contents, and the preset that records them."""

_LOSSES = ("drop", "lost", "size limit", "couldn't allocate", "errors occurred", "not all", "truncated", "discard")


_finding = partial(of_case, "nvprof_kit._analysis", "checks.toml")
"""The finding of a case of `checks.toml`, with its facts, of another severity if one is given."""


def examine_captures(captures: Sequence[CaptureHealth]) -> dict[str, tuple[Finding, ...]]:
    """Findings of each capture by its path, most severe first; one without kernels is judged relative to the others."""
    any_kernels = any(capture.rows.get(_KERNELS) for capture in captures)
    checks = (_tables, _columns, _processes, _ranges, _complaints, _graphs, _overhead, _length, _secrets)
    return {
        capture.path: by_severity(
            [*_kernels(capture, any_kernels), *(finding for check in checks for finding in check(capture))]
        )
        for capture in captures
    }


def examine_trace(trace: Trace) -> tuple[Finding, ...]:
    """Findings of a PyTorch trace, most severe first."""
    operations, modules = len(trace.ops), int((trace.ranges["category"].isin(LAYER_PHASES)).sum())
    window_ns = int(trace.ops["end_ns"].max() - trace.ops["start_ns"].min()) if operations else 0
    kernels = _finding("operations" if trace.info.on_gpu else "cpu-only", operations=operations, calls=len(trace.api))
    ranges = _finding("modules" if modules else "no-modules", calls=modules)
    return by_severity([kernels, ranges, *_length(CaptureHealth(trace.info.path, {}, window_ns=window_ns))])


_CHECKED = ("lost-kernels", "overhead", "whole-graphs", "nsys-message", "open-ranges", "no-layers", "no-gpu", "rows")
"""Codes of issues that a check of its own looks at."""


def examine_issues(issues: Iterable[Issue]) -> Iterator[Finding]:
    """What an analysis says of a capture, down to what concerns too little to be printed beside an answer, but no notes
    about 0.0 % of it.
    """
    for issue in in_order(issues):
        if issue.code not in _CHECKED and (issue.severity != "note" or issue.share >= 0.0005):
            yield checked(issue.severity, "analysis", issue)


def _kernels(capture: CaptureHealth, others_have_kernels: bool) -> Iterator[Finding]:
    kernels, calls = capture.rows.get(_KERNELS, 0), capture.rows.get(_RUNTIME, 0)
    launches, lost_count = capture.losses.launches, capture.losses.lost_kernels
    if kernels and lost_count:
        severity = "error" if lost_count > LOST_SHARE * launches else "note"
        yield _finding("lost-kernels", severity, lost=lost_count, launches=launches)
    if kernels:
        yield _finding("kernels", kernels=kernels, calls=calls)
    elif calls:
        yield _finding("no-kernels", calls=calls)
    else:
        yield _finding("no-calls-of-rank" if others_have_kernels else "no-calls")


def _tables(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.rows.get(_KERNELS) and not capture.rows.get(_RUNTIME):
        yield _finding("no-table-of-calls")
    lacking = [
        f"{noun} (nvprof-kit profile --preset {preset})"
        for table, (noun, preset) in _EXTRAS.items()
        if not capture.rows.get(table)
    ]
    if lacking and capture.rows.get(_RUNTIME):
        yield _finding("not-recorded", tables=", ".join(lacking))


def _columns(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.without_payloads:
        yield _finding("payloads")
    for sentence in capture.incomplete:
        yield _finding("incomplete", sentence=sentence)


def _processes(capture: CaptureHealth) -> Iterator[Finding]:
    processes = capture.processes or {}
    idle = sorted(pid for pid, count in processes.items() if not count)
    if len(processes) > 1 and idle and len(idle) < len(processes):
        yield _finding("processes", idle=len(idle), all=len(processes), pids=", ".join(map(str, idle[:8])))


def _ranges(capture: CaptureHealth) -> Iterator[Finding]:
    domains = capture.domains or {}
    ours = domains.get(DOMAIN, 0)
    by_domain = {name: count for name, count in domains.items() if name != DOMAIN and not LIBRARY.search(name)}
    if ours:
        yield _finding("ranges", ranges=ours)
    elif DOMAIN in capture.registered:
        yield _finding("empty-domain")
    elif by_domain:
        largest = max(by_domain, key=lambda name: by_domain[name])
        names = {"largest": largest or "the default domain", "option": shlex.quote(largest)}
        yield _finding("other-domains", ranges=sum(by_domain.values()), **names)
    else:
        yield _finding("no-ranges")
    if capture.open_ranges:
        yield _finding("open-ranges", ranges=capture.open_ranges)


def _complaints(capture: CaptureHealth) -> Iterator[Finding]:
    guesses = [text for text, _, _ in capture.complaints if GUESS.search(text)]
    launches = capture.losses.launches
    complete, unknown = launches > 0 and not capture.losses.lost_kernels, bool(guesses) and not launches
    if guesses and (complete or unknown):
        check = "refuted-guesses" if complete else "guesses"
        yield _finding(check, count=len(guesses), launches=launches, texts=" · ".join(guesses))
    for text, count, is_error in capture.complaints:
        if (complete or unknown) and text in guesses:
            continue
        is_loss = any(word in text.lower() for word in _LOSSES)
        fix = "check this machine: nvprof-kit doctor"
        if "driver version" in text:
            fix = "install the nsys of the driver's CUDA release or a newer one; nvprof-kit doctor names it"
        elif is_loss:
            fix = "capture a shorter window and trace less, with an nsys as new as the driver"
        elif "cudnn" in text.lower():
            fix = "leave cudnn out of --trace; the tables do not need it"
        why = "if events are missing, sums are too small" if is_loss else "nsys wrote this into the capture"
        severity = "error" if is_loss and not GUESS.search(text) else "warning"
        rule = "lost-events" if is_loss else "nsys-error" if is_error else "nsys-warning"
        yield checked(severity, rule, text + (f" ({count} times)" if count > 1 else ""), why, fix)


def _graphs(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.losses.whole_graphs:
        yield _finding("whole-graphs", graphs=capture.losses.whole_graphs)


def _overhead(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.window_ns:
        overhead_ns = capture.losses.overhead_ns
        check = "large-overhead" if overhead_ns / capture.window_ns > OVERHEAD_SHARE else "overhead"
        yield _finding(check, overhead_ms=overhead_ns / 1e6, window_ms=capture.window_ns / 1e6)


def _length(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.window_ns > LONG_NS:
        yield _finding("length", seconds=capture.window_ns / 1e9)


def _secrets(capture: CaptureHealth) -> Iterator[Finding]:
    is_read = not any("TARGET_INFO_SYSTEM_ENV" in name for name in capture.incomplete)
    commands = commands_to_scrub(capture.path)
    if capture.homes:
        yield _finding("homes", homes=", ".join(capture.homes[:4]), commands=commands)
    if capture.environment:
        secrets = secret_names(list(capture.environment))
        among = f", among them {listing(secrets, 6)}" if secrets else ""
        severity = "warning" if secrets else "note"
        yield _finding("environment", severity, count=len(capture.environment), secrets=among, commands=commands)
    elif is_read and not capture.homes:
        yield _finding("private")
