"""What to do with a window's trace when it is ready: print its table, keep it under its step, lay it out for a tool,
show it to a monitoring system.

Each function gives what `nvprof_kit.scheduled` and `nvprof_kit.LayerProfiler` take as ``on_trace_ready``.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.rank_claim import claim
from nvprof_kit._instrument.ranks import rank, rank_folder

if TYPE_CHECKING:
    from nvprof_kit._capture.recorder.scheduled import OnTraceReady


def table(depth: int | None = None, file: TextIO | None = None) -> OnTraceReady:
    """Print what each layer costs, on rank 0.

    Args:
        depth: Levels of the model, None for all.
        file: Where to; None is stdout.
    """

    def handle(trace: Path, _window: Window) -> None:
        if rank():
            return
        from nvprof_kit._analysis.layers.layers import layers
        from nvprof_kit._report.text.layers import LayersView, layers_report
        from nvprof_kit._report.text.table.terminal import print_to
        from nvprof_kit._trace.open import open_capture

        print_to(file or sys.stdout, layers_report(layers(open_capture(trace)), LayersView(depth)))

    return handle


def chrome_trace(folder: str | Path = "traces", mesh: Any = None) -> OnTraceReady:
    """Keep each window's trace under its steps, for Perfetto and chrome://tracing:
    ``traces/rank0_dp0_tp0_pp0/trace_step_12.json.gz``; with ``active=1`` in the schedule, a file for each step.

    Args:
        folder: Holds a folder for each rank.
        mesh: As for `nvprof_kit._instrument.ranks.rank_folder`.
    """

    def handle(trace: Path, window: Window) -> None:
        steps = str(window.first_step) + (f"-{window.last_step}" if window.last_step > window.first_step else "")
        _keep(trace, folder, mesh, f"trace_step_{steps}{_suffix(trace)}")

    return handle


def tensorboard(folder: str | Path = "traces", mesh: Any = None) -> OnTraceReady:
    """Lay each window's trace out as TensorBoard's profiler plug-in and Holistic Trace Analysis look for it:
    ``traces/rank0_dp0_tp0_pp0/HOST_PID.TIME.pt.trace.json.gz``, as ``torch.profiler.tensorboard_trace_handler`` does.

    Args:
        folder: Holds a folder for each rank.
        mesh: As for `nvprof_kit._instrument.ranks.rank_folder`.
    """

    def handle(trace: Path, _window: Window) -> None:
        name = f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace{_suffix(trace)}"
        _keep(trace, folder, mesh, name)

    return handle


def prometheus(registry: Any = None, *, folder: str | Path | None = None, kinds: int = 32) -> OnTraceReady:
    """Show each window as gauges of Prometheus: time per step by kind of layer, phase and rank; length of a step.

    It opens no socket: a program that is to be scraped calls ``prometheus_client.start_http_server``, or serves the
    registry in another way. Whatever goes wrong with a window is a warning.

    Args:
        registry: The ``CollectorRegistry``; None for the library's own, or, with a folder, for one of this handler.
        folder: Where the node exporter's textfile collector looks: ``nvprof_kit_rank0.prom`` is left there, a file for
            each rank; None for none.
        kinds: How many kinds of layers are told apart; the rest is ``(other)``.

    Raises:
        ToolError: prometheus-client is not installed.
    """
    from nvprof_kit._profiler.telemetry import PrometheusGauges

    return PrometheusGauges(registry, None if folder is None else Path(folder), kinds)


def otlp(meter_provider: Any = None, *, kinds: int = 32) -> OnTraceReady:
    """Show each window as gauges of OpenTelemetry, with the figures and labels of `prometheus`.

    It opens no socket: the meter provider's readers export, over OTLP where they have such an exporter. Whatever goes
    wrong with a window is a warning.

    Args:
        meter_provider: The ``MeterProvider``; None for the program's own.
        kinds: How many kinds of layers are told apart; the rest is ``(other)``.

    Raises:
        ToolError: opentelemetry-sdk is not installed.
    """
    from nvprof_kit._profiler.telemetry import OtlpGauges

    return OtlpGauges(meter_provider, kinds)


def together(*handlers: OnTraceReady) -> OnTraceReady:
    """Several handlers, one after the other."""

    def handle(trace: Path, window: Window) -> None:
        for one in handlers:
            one(trace, window)

    return handle


def _keep(trace: Path, folder: str | Path, mesh: Any, name: str) -> None:
    try:
        _place(trace, claim(Path(folder) / rank_folder(mesh)), name)
    except OSError as error:  # a full disk, say: the program does not die of it
        warnings.warn(f"{folder}: cannot keep {name} there ({error.strerror})", stacklevel=3)


def _suffix(trace: Path) -> str:
    return ".json.gz" if trace.name.endswith(".gz") else ".json"


def _place(trace: Path, folder: Path, name: str) -> None:
    """A copy under another name, which takes no room where the file system can link; whole when it appears."""
    partial = folder / f".{name}.{os.getpid()}"
    partial.unlink(missing_ok=True)
    try:
        try:
            os.link(trace, partial)
        except OSError:
            shutil.copyfile(trace, partial)
        partial.replace(folder / name)
    finally:
        partial.unlink(missing_ok=True)  # a rename between two names of one file does nothing
