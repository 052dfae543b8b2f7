"""Trace handlers: print a table, keep the trace, or write it for TensorBoard.

Each function returns a handler to pass to `nvprof_kit.record` or `nvprof_kit.LayerProfiler` as ``on_trace_ready``.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.ranks import claim, rank, rank_folder, replacing

if TYPE_CHECKING:
    from nvprof_kit._capture.recorder.record import OnTraceReady


def table(depth: int | None = None, file: TextIO | None = None) -> OnTraceReady:
    """Print the table of layers of each window, on rank 0.

    Args:
        depth: How many levels of the model to print; None for all.
        file: Where to print; None for stdout.
    """

    def handle(trace: Path, _window: Window) -> None:
        if rank():
            return
        from nvprof_kit._analysis.attribution.attribution import Operations
        from nvprof_kit._analysis.layers.layers import layers
        from nvprof_kit._report.text.layers import layers_report
        from nvprof_kit._report.text.table import print_to
        from nvprof_kit._trace.open import open_capture

        print_to(file or sys.stdout, layers_report(replace(layers(Operations(open_capture(trace))), depth=depth)))

    return handle


def chrome_trace(folder: str | Path = "traces", mesh: Any = None) -> OnTraceReady:
    """Keep the trace of each window, named after its steps, for Perfetto.

    The file is ``traces/rank0_dp0_tp0_pp0/trace_step_12.json.gz``. With ``active=1`` in the schedule, each file has one
    step.

    Args:
        folder: Output folder; each rank writes to its own subfolder.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the subfolder.
    """

    def handle(trace: Path, window: Window) -> None:
        steps = str(window.first_step) + (f"-{window.last_step}" if window.last_step > window.first_step else "")
        _keep(trace, folder, mesh, f"trace_step_{steps}")

    return handle


def tensorboard(folder: str | Path = "traces", mesh: Any = None) -> OnTraceReady:
    """Write each trace where TensorBoard's profiler plug-in and Holistic Trace Analysis expect it.

    The file is ``traces/rank0_dp0_tp0_pp0/HOST_PID.TIME.pt.trace.json.gz``, named as by
    ``torch.profiler.tensorboard_trace_handler``.

    Args:
        folder: Output folder; each rank writes to its own subfolder.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the subfolder.
    """

    def handle(trace: Path, _window: Window) -> None:
        _keep(trace, folder, mesh, f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace")

    return handle


def together(*handlers: OnTraceReady) -> OnTraceReady:
    """Combine several handlers; they run in order.

    Args:
        handlers: The handlers.
    """

    def handle(trace: Path, window: Window) -> None:
        for handler in handlers:
            handler(trace, window)

    return handle


def _keep(trace: Path, folder: str | Path, mesh: Any, name: str) -> None:
    """Copy a trace into the rank's folder; it appears there only when complete."""
    name += ".json.gz" if trace.name.endswith(".gz") else ".json"
    try:
        target = claim(Path(folder) / rank_folder(mesh)) / name
        with replacing(target) as partial:
            shutil.copyfile(trace, partial)
    except OSError as error:  # a full disk must not end the program
        warnings.warn(f"{folder}: cannot keep {name} there ({error.strerror})", stacklevel=3)
