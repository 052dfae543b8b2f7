"""Checks whether a capture is reliable: takes facts about how it was recorded, and returns findings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from nvprof_kit._findings import Finding, by_severity, checked
from nvprof_kit._trace.nsys.health import CaptureHealth
from nvprof_kit._trace.nsys.scrub import secret_names
from nvprof_kit._trace.nsys.warnings import GUESS
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue, in_order
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
    info, operations = trace.info, len(trace.ops)
    if info.on_gpu:
        kernels = checked("ok", "kernels", f"{operations:,} GPU operations, {len(trace.api):,} launching calls")
    else:
        kernels = checked(
            "warning",
            "kernels",
            f"no GPU operation, {operations:,} intervals of CPU operators",
            "all times are of the CPU",
            "record with the activity CUDA: nvprof-kit record, or activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA], on a GPU that no other profiler uses",
        )
    layers = int((trace.ranges["category"].isin(LAYER_PHASES)).sum())
    if layers:
        ranges = checked("ok", "ranges", f"{layers:,} calls of modules")
    else:
        ranges = checked(
            "warning",
            "ranges",
            "no calls of modules",
            "layers are from the order of kernels or from operators alone",
            "record with nvprof-kit record --annotate, or with with_stack=True",
        )
    window_ns = int(trace.ops["end_ns"].max() - trace.ops["start_ns"].min()) if operations else 0
    length = _length(CaptureHealth(info.path, {}, window_ns=window_ns))
    return by_severity([kernels, ranges, *length])


_CHECKED = ("lost-kernels", "overhead", "whole-graphs", "nsys-message", "open-ranges", "no-layers", "no-gpu", "rows")
"""Codes of issues that a check of its own looks at."""


def examine_issues(issues: Iterable[Issue]) -> Iterator[Finding]:
    """What an analysis says of a capture, down to what concerns too little to be printed beside an answer."""
    for issue in in_order(issues):
        if issue.code not in _CHECKED:
            yield checked(issue.severity, "analysis", issue)


def _kernels(capture: CaptureHealth, others_have_kernels: bool) -> Iterator[Finding]:
    kernels, calls = capture.rows.get(_KERNELS, 0), capture.rows.get(_RUNTIME, 0)
    launches, lost_count = capture.losses.launches, capture.losses.lost_kernels
    if kernels and lost_count:
        evidence = f"{lost_count:,} of {launches:,} kernel launches have no kernel in the capture"
        why = "every sum lacks the time of these kernels; those launched at the end of a window ran after it ended"
        fix = "end the window after torch.cuda.synchronize(), capture fewer steps, or use an nsys as new as the driver"
        yield checked("error" if lost_count > LOST_SHARE * launches else "note", "lost-events", evidence, why, fix)
    if kernels:
        yield checked("ok", "kernels", f"{kernels:,} kernels, {calls:,} CUDA calls")
    elif calls:
        why = (
            "nsys saw the launches but lost the kernels: another CUPTI client (torch.profiler, DCGM) holds the GPU, "
            "or nsys is older than the driver, or the program ended before the GPU was done"
        )
        fix = "remove torch.profiler, call torch.cuda.synchronize() before the end, and run nvprof-kit doctor"
        yield checked("error", "kernels", f"{calls:,} CUDA calls but no kernel", why, fix)
    else:
        why = "no CUDA call was made within the capture: CUDA was not traced, or the window missed the work"
        if others_have_kernels:
            why = "other captures have kernels, so this rank was not traced or did no work"
        window = "in a window in which the program uses the GPU: nvprof-kit profile --step N"
        fix = f"record with --trace=cuda,nvtx, {window}"
        yield checked("error", "kernels", "no kernel and no CUDA call", why, fix)


def _tables(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.rows.get(_KERNELS) and not capture.rows.get(_RUNTIME):
        why = "a kernel's layer is found from the call that launched it, so no kernel has one"
        export = "nsys export --type=sqlite --force-overwrite=true REPORT"
        fix = f"record with --trace=cuda, and export every table: {export}"
        yield checked("error", "tables", "kernels, but no table of CUDA calls", why, fix)
    lacking = [
        f"{noun} (nvprof-kit profile --preset {preset})"
        for table, (noun, preset) in _EXTRAS.items()
        if not capture.rows.get(table)
    ]
    if lacking and capture.rows.get(_RUNTIME):
        yield checked("ok", "tables", f"not recorded: {', '.join(lacking)}")


def _columns(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.without_payloads:
        why = "sizes and communicators of NCCL's collectives are missing: ranks matches them by their order alone"
        fix = "export the report again: nsys export --include-blobs=true --type=sqlite REPORT"
        yield checked("warning", "tables", "exported without the payloads of NVTX ranges", why, fix)
    for sentence in capture.incomplete:
        why = "what these columns tell is missing in the tables, and from these checks"
        fix = "export the report again with the nsys that recorded it: nsys export --type=sqlite REPORT"
        yield checked("warning", "tables", sentence, why, fix)


def _processes(capture: CaptureHealth) -> Iterator[Finding]:
    processes = capture.processes or {}
    idle = sorted(pid for pid, count in processes.items() if not count)
    if len(processes) > 1 and idle and len(idle) < len(processes):
        evidence = f"{len(idle)} of {len(processes)} processes ran no kernel: {', '.join(map(str, idle[:8]))}"
        why = "a rank among them was lost or did no work; data loader workers and launchers normally run none"
        fix = "give each rank its own capture with nvprof-kit ranks profile, and start workers by spawn instead of fork"
        yield checked("warning", "processes", evidence, why, fix)


def _ranges(capture: CaptureHealth) -> Iterator[Finding]:
    domains = capture.domains or {}
    ours, by_domain = domains.get(DOMAIN, 0), {name: count for name, count in domains.items() if name != DOMAIN}
    if ours:
        yield checked("ok", "ranges", f"{ours:,} ranges in the nvprof_kit domain")
    elif DOMAIN in capture.registered:
        why = "without ranges no kernel has a layer; nvtx did not detect this nsys, or no call ran in the window"
        fix = "update nvprof-kit, capture whole steps, and check that NVPROF_KIT is not off"
        yield checked("error", "ranges", "the nvprof_kit domain exists, but has no range", why, fix)
    elif by_domain:
        largest = max(by_domain, key=lambda name: by_domain[name])
        in_others = f"{sum(by_domain.values()):,} in others, most in {largest or 'the default domain'!r}"
        evidence = f"no range in our domain, but {in_others}"
        why = "layers are read from one domain only"
        fix = f"read them with --domain {shlex.quote(largest)}, or annotate the model: nvprof_kit.annotate_model(model)"
        yield checked("warning", "ranges", evidence, why, fix)
    else:
        why = "layers are from the order of kernels alone, if it shows any"
        fix = "annotate the model: nvprof_kit.annotate_model(model), and record with --trace=cuda,nvtx"
        yield checked("warning", "ranges", "no NVTX range", why, fix)
    if capture.open_ranges:
        why = "the capture ended inside them; they count up to its end"
        fix = "capture whole steps: nvprof-kit profile --step N"
        yield checked("note", "open-ranges", f"{capture.open_ranges:,} ranges have no end", why, fix)


def _complaints(capture: CaptureHealth) -> Iterator[Finding]:
    guesses = [text for text, _, _ in capture.complaints if GUESS.search(text)]
    launches = capture.losses.launches
    complete = launches > 0 and not capture.losses.lost_kernels
    if guesses and complete:
        reassurance = f"but each of {launches:,} kernel launches has its kernel"
        evidence = f"{len(guesses)} that something might be missing, {reassurance}: {' · '.join(guesses)}"
        yield checked("ok", "nsys-messages", evidence)
    unknown = bool(guesses) and not launches
    if unknown:
        evidence = f"{len(guesses)} that something might be missing: {' · '.join(guesses)}"
        why = "nsys writes this into most captures; no launch outside CUDA graphs is there to compare with the kernels"
        fix = "compare the kernels of a step with what the program launches, or capture it once without CUDA graphs"
        yield checked("note", "nsys-messages", evidence, why, fix)
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
        evidence = f"{capture.losses.whole_graphs:,} CUDA graph replays, each traced as a whole"
        why = "their kernels cannot be told apart and belong to no layer, or are missing"
        fix = "record with --cuda-graph-trace=node, as the preset train does"
        yield checked("warning", "cuda-graphs", evidence, why, fix)


def _overhead(capture: CaptureHealth) -> Iterator[Finding]:
    if not capture.window_ns:
        return
    overhead_ns = capture.losses.overhead_ns
    share = overhead_ns / capture.window_ns
    seen = f"nsys itself took {overhead_ns / 1e6:.1f} ms of the window of {capture.window_ns / 1e6:.1f} ms"
    if share > OVERHEAD_SHARE:
        why = "CPU times and gaps between kernels are too long; the kernels' own times are not affected"
        fix = "start the window later, after libraries are loaded and buffers made: nvprof-kit profile --step N"
        yield checked("warning", "overhead", seen, why, fix)
    else:
        yield checked("ok", "overhead", seen)


def _length(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.window_ns > LONG_NS:
        evidence = f"the capture covers {capture.window_ns / 1e9:.0f} s"
        why = "long captures lose events and are slow to read; a few steps answer the question"
        fix = "nvprof-kit profile --step N, or --schedule 50:60"
        yield checked("note", "length", evidence, why, fix)


def _secrets(capture: CaptureHealth) -> Iterator[Finding]:
    if capture.homes:
        evidence = f"home folder names: {', '.join(capture.homes[:4])}"
        why = "paths of libraries and tools reveal who ran the program"
        fix = f"nvprof-kit scrub {shlex.quote(capture.path)}"
        yield checked("note", "privacy", evidence, why, fix)
    if not capture.environment:
        if not capture.homes and not any("TARGET_INFO_SYSTEM_ENV" in column for column in capture.incomplete):
            yield checked("ok", "privacy", "no environment variables, no home folders")
        return
    secrets = secret_names(list(capture.environment))
    named = f", among them {', '.join(secrets[:6])}" if secrets else ""
    evidence = f"{len(capture.environment)} environment variables with their values{named}"
    why = "anyone given the file can read them, the command line and the host name; the .nsys-rep has them too"
    fix = f"nvprof-kit scrub {shlex.quote(capture.path)}"
    yield checked("warning" if secrets else "note", "privacy", evidence, why, fix)
