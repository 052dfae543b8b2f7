"""`LayerProfiler`: record and analyze some steps of a training loop in the process itself.

It writes time and memory of each layer in each step as trace, plots, tables and text, in one folder per rank.
"""

from __future__ import annotations

import atexit
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.schedule import Action, Schedule, Switch, Windows
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._profiler.cost import StepClock
from nvprof_kit.errors import PATH, require
from nvprof_kit.names import Category

if TYPE_CHECKING:
    from torch import nn

    from nvprof_kit._capture.recorder.record import OnTraceReady
    from nvprof_kit._instrument.meters.throughput import Throughput
    from nvprof_kit._profiler.window import Recorded

F = TypeVar("F", bound=Callable[..., Any])


class LayerProfiler:
    """Measure time and memory of each layer over some steps; a context manager around the loop, or a decorator.

    ```python
    with LayerProfiler(model, "10:13") as profiling:   # steps 10, 11 and 12
        for batch in loader:
            train(batch)
            profiling.step()


    @LayerProfiler(model, "10:13")                     # each call is a step
    def train(batch): ...
    ```

    Use one profiler per loop. Without a schedule (neither the argument nor ``NVPROF_KIT_SCHEDULE``), and with
    ``NVPROF_KIT=off``, it does nothing. Under nsys or ncu it starts and stops the tool at each window, as `record`
    does, and leaves the recording to the tool. Inside the loop, errors of the profiler become warnings. Times are from
    PyTorch's profiler (Kineto), memory from the CUDA caching allocator.

    Args:
        model: The model; held weakly. It is annotated while a window is recorded, unless it already is.
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`; ``"0:1"`` for one step.
        folder: Output folder; each rank writes to its own subfolder, ``rank0_dp0_tp0_pp0``.
        name: Prefix of the file names; None for the model's class.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the subfolder. By default that of the
            model's parameters, if they have one.
        kinds: Kind of block by a glob pattern of its path or class name; overrides the detected kinds:
            ``{"*.temporal_blocks.*": "temporal"}``.
        stacks: Record Python call stacks, as `nvprof_kit.record` does; likewise `shapes` of inputs.
        shapes: Record input shapes.
        allocations: Record each allocation and release.
        memory: Read the CUDA allocator's counters at the begin and end of each layer.
        steps: Range each step; set False if the loop ranges its steps itself.
        plots: Write the plots.
        utilisation: Sample CPU and GPU during each window; needs ``pip install "nvprof-kit[utilisation]"``.
        throughput: A meter of the loop; its figures are added to the log.
        echo: Rank 0 prints the head of each log.
        on_trace_ready: Called with each trace and its window, after the profiler has written its own files.

    Attributes:
        enabled: Whether the profiler is on.

    Raises:
        UsageError: The schedule is invalid, or the folder is no path.
        ToolError: `utilisation` is set and its libraries are not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Switch = None,
        folder: str | Path = "traces",
        *,
        name: str | None = None,
        mesh: Any = None,
        kinds: Mapping[str, str] | None = None,
        stacks: bool = False,
        shapes: bool = False,
        allocations: bool = False,
        memory: bool = True,
        steps: bool = True,
        plots: bool = True,
        utilisation: bool = False,
        throughput: Throughput[Any] | None = None,
        echo: bool = True,
        on_trace_ready: OnTraceReady | None = None,
    ) -> None:
        plan = Schedule.of(schedule)
        require(folder, PATH, "LayerProfiler: folder", "a path")
        self._range_steps = steps
        self.enabled = plan is not None and session.mode != "off"
        self._running = self._over = False
        self._process = 0
        self._step: Range | None = None
        if plan is not None and self.enabled:
            from torch import nn

            from nvprof_kit._capture.recorder.record import RecordOptions
            from nvprof_kit._profiler.window import WindowRecorder

            require(model, nn.Module, "LayerProfiler: model", "a torch.nn.Module")
            require(kinds, (Mapping, type(None)), "LayerProfiler: kinds", "a dict of kinds by pattern")
            self._clock = StepClock()
            self._recorder = WindowRecorder(
                model=weakref.ref(model),
                clock=self._clock,
                several=plan.repeat != 1,
                folder=Path(folder),
                name=name,
                mesh=mesh,
                kinds=kinds or {},
                detail=RecordOptions(stacks, shapes, allocations),
                memory=memory,
                range_steps=steps,
                plots=plots,
                utilisation=utilisation,
                throughput=throughput,
                echo=echo,
                on_trace_ready=on_trace_ready,
            )
            self._windows = Windows(plan, self._recorder)

    @property
    def recorded(self) -> list[Recorded]:
        """The results of the last windows, at most 16, in order."""
        return list(self._recorder.recorded) if self.enabled else []

    def __enter__(self) -> LayerProfiler:
        """Begin the loop with step 0."""
        if self.enabled and not self._over:
            self._running, self._process = True, os.getpid()
            self._safely(self._begin)
        return self

    def step(self) -> None:
        """End the current step and begin the next."""
        if self._running and not self._is_forked():
            self._safely(self._next)

    def __exit__(self, *_exception: object) -> None:
        """End the loop; a running window is written, also after an exception."""
        if self._running and not self._is_forked():
            self._safely(self._end)

    def _is_forked(self) -> bool:
        """Whether this process is a forked child of the profiled one, which must not end or write anything."""
        if self._process != os.getpid():
            self._running, self._over = False, True
        return self._over

    def __call__(self, function: F) -> F:
        """Decorate a function that runs one step; the loop begins with the first call and ends at exit."""
        if not self.enabled:
            return function

        @functools.wraps(function)
        def one_step(*args: Any, **kwargs: Any) -> Any:
            if not self._running and not self._over:
                atexit.register(self.__exit__)
                self.__enter__()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self.__exit__()
                raise
            self.step()
            return result

        return one_step  # type: ignore[return-value]

    def _safely(self, move: Callable[[], object]) -> None:
        """Run profiler code; if it fails, stop the profiler and let the program continue."""
        try:
            move()
        except Exception as error:
            self._running, self._over = False, True
            warnings.warn(f"LayerProfiler stops: {type(error).__name__}: {error}", stacklevel=3)
            self._recorder.cancel()

    def _begin(self) -> None:
        if self._range_steps:
            from nvprof_kit._instrument.loop.inferred import stop_inferring

            stop_inferring()
        self._windows.__enter__()
        self._begin_step()

    def _next(self) -> None:
        self._end_step()
        self._windows.step()
        last = self._windows.schedule.last_step
        if last is not None and self._windows.step_number > last:
            self._running, self._over = False, True  # no overhead in the rest of the loop
        else:
            self._begin_step()

    def _end(self) -> None:
        self._running, self._over = False, True
        if self._windows.step_number:
            self._clock.skip()  # the step that began after the last one
        self._end_step()
        self._windows.__exit__()
        if not self._recorder.seen:
            warnings.warn(
                f"LayerProfiler recorded nothing: the loop ended in step {self._windows.step_number}, the schedule is "
                f"{self._windows.schedule}; call step() at the end of each step",
                stacklevel=4,
            )

    def _begin_step(self) -> None:
        recorded = self._windows.action.records
        if recorded and self._range_steps and session.backend is not None:
            number = self._windows.step_number
            self._step = Range(f"step {number}", Category.STEP, number)
            session.backend.open(self._step, self)
        if self._windows.action is not Action.WARMUP:
            self._clock.begin(recorded=recorded)

    def _end_step(self) -> None:
        self._clock.end()
        if self._step is not None and session.backend is not None:
            session.backend.close(self)
        self._step = None
