"""Record some steps of a loop with the attached profiler: nsys, ncu, or the embedded recorder."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvprof_kit._capture.recorder.record import RecordOptions, part_of, record, running, tool_attached
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.schedule import Schedule, Switch, Window, Windows
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit._instrument.ranks import mark_rank, rank, world_size
from nvprof_kit.names import WINDOW, Category

OnTraceReady = Callable[[Path, Window], object]
"""Called with each window's trace after it is written."""


class scheduled(Windows):
    """Record some steps of a loop; a context manager around the loop.

    ```python
    with nvprof_kit.scheduled("stable") as profiling:
        for batch in loader:
            train(batch)
            profiling.step()
    ```

    Consecutive recorded steps are a window. Under nsys or ncu, each window calls cudaProfilerStart and
    cudaProfilerStop, and is an NVTX range ``window`` in the domain ``nvprof_kit``; the tool can capture either (nsys:
    ``--capture-range``). The recipes do so with ``--windows``. Without a tool, the embedded recorder writes a trace per
    window.

    If a recording is already running, as under ``nvprof-kit record``, a warning says that the windows get no traces of
    their own. If a handler fails, a warning says so and the loop continues.

    Args:
        schedule: Which steps, in any form of `nvprof_kit.Schedule.of`. None reads ``NVPROF_KIT_SCHEDULE``, and records
            nothing if it is not set.
        path: Trace file of the embedded recorder; by default ``run.json.gz``, or ``run.rank3.json.gz`` in a multi-rank
            program. With several windows, ``run.1.json.gz``, ``run.2.json.gz``, ….
        stacks: As of `nvprof_kit.record`, like `shapes` and `memory`.
        shapes: As of `nvprof_kit.record`.
        memory: As of `nvprof_kit.record`.
        on_trace_ready: Called with each trace of the embedded recorder and its window.

    Raises:
        UsageError: The schedule is invalid; or, in the loop, a trace cannot be written.
        ToolError: In the loop: PyTorch is not installed.
    """

    def __init__(
        self,
        schedule: Switch = None,
        path: str | Path | None = None,
        *,
        stacks: bool = False,
        shapes: bool = False,
        memory: bool = False,
        on_trace_ready: OnTraceReady | None = None,
    ) -> None:
        plan = Schedule.of(schedule)
        if plan is None:
            super().__init__(Schedule(), Nothing())
            return
        detail = RecordOptions(stacks, shapes, memory)
        super().__init__(plan, Tool() if tool_attached() else Traces(path, plan.repeat != 1, detail, on_trace_ready))


class Nothing:
    """Records nothing."""

    def warm_up(self, _window: Window) -> None:
        """Nothing."""

    def start(self, _window: Window) -> None:
        """Nothing."""

    def stop(self, _window: Window) -> None:
        """Nothing."""

    def cancel(self) -> None:
        """Nothing."""


class Tool(Nothing):
    """Starts and stops the capture of nsys and ncu at each window."""

    def __init__(self) -> None:
        self._range = Range(WINDOW, Category.USER)
        self._started: Any = None

    def start(self, _window: Window) -> None:
        """Begin a window after the GPU has completed the work of earlier steps."""
        cuda = _cuda()
        if cuda is not None:
            cuda.synchronize()
            cuda.cudart().cudaProfilerStart()
        if session.backend is not None:
            self._started = session.backend.start(self._range)
            mark_rank(repeat=True)

    def stop(self, _window: Window) -> None:
        """End a window after the GPU has completed its work."""
        cuda = _cuda()
        if cuda is not None:
            cuda.synchronize()
        if session.backend is not None and self._started is not None:
            session.backend.end(self._started)
        if cuda is not None:
            cuda.cudart().cudaProfilerStop()
        self._started = None

    def cancel(self) -> None:
        """End a window in which no step ran."""
        if self._started is not None:
            self.stop(Window(0, 0))


class Traces(Nothing):
    """The embedded recorder, with one trace per window."""

    def __init__(
        self,
        path: str | Path | None,
        several: bool,
        options: RecordOptions,
        on_trace_ready: OnTraceReady | None,
    ) -> None:
        self._path = path
        self._several = several
        self._options = options
        self._on_trace_ready = on_trace_ready
        self._recorder: record | None = None

    def warm_up(self, window: Window) -> None:
        """Set up the profiler."""
        outer = running()
        if outer is not None:
            warnings.warn(
                f"{outer.path.name} is being recorded already: step {window.first_step} and on are in it, and get no "
                "trace of their own",
                stacklevel=4,
            )
            return
        self._recorder = record(self._path_of(window), **vars(self._options))
        self._recorder.warm_up()

    def start(self, window: Window) -> None:
        """Start recording."""
        if self._recorder is None:
            self.warm_up(window)
        if self._recorder is not None:
            self._recorder.__enter__()

    def stop(self, window: Window) -> None:
        """Write the trace and call the handler."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
            if recorder.written and self._on_trace_ready is not None:
                try:
                    self._on_trace_ready(recorder.path, window)
                except Exception as error:  # a failing handler must not end the program
                    warnings.warn(f"on_trace_ready failed: {type(error).__name__}: {error}", stacklevel=4)

    def cancel(self) -> None:
        """Discard the warm-up, or a window in which no step ran."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.cancel()

    def _path_of(self, window: Window) -> Path:
        """``run.json.gz``, or numbered from 1 like the reports of nsys."""
        path = Path(self._path or of_rank(Path("run.json.gz")))
        return part_of(path, str(window.number + 1)) if self._several else path


def of_rank(path: Path) -> Path:
    """The trace of this process: ``run.rank3.json.gz`` in a multi-rank program, else the path itself."""
    return part_of(path, f"rank{rank()}") if world_size() > 1 else path


def _cuda() -> Any:
    """``torch.cuda`` if the program uses it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
