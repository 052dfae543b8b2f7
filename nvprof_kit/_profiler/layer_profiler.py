"""`LayerProfiler`: some steps of a training loop, recorded and read in the process itself: time and memory of every
layer in every iteration, by kind of block, as trace, curves, tables and text in a folder for each rank.
"""

from __future__ import annotations

import atexit
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nvprof_kit._instrument.loop.schedule import Action, Windows
from nvprof_kit._instrument.loop.step_clock import StepClock
from nvprof_kit._instrument.loop.switch import Switch, profiling_schedule
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit._profiler.options import LayerOptions
from nvprof_kit.names import Category

if TYPE_CHECKING:
    from torch import nn

    from nvprof_kit._capture.recorder.scheduled import OnTraceReady
    from nvprof_kit._profiler.window import Recorded

F = TypeVar("F", bound=Callable[..., Any])


class LayerProfiler:
    """Time and memory of every layer over some steps; a context manager around the loop, or a decorator of one step.

    ```python
    with LayerProfiler(model, "10:13") as profiling:   # steps 10, 11 and 12
        for batch in loader:
            train(batch)
            profiling.step()


    @LayerProfiler(model, "10:13")                     # each call is a step
    def train(batch): ...
    ```

    It serves one loop. It is off, and does nothing at all, where no schedule is given, neither here nor by
    ``NVPROF_KIT_PROFILING``, and under ``NVPROF_KIT=off``. Under nsys or ncu it tells the tool when a window begins and
    ends, as `scheduled` does, and leaves recording to it. What goes wrong in it once the loop runs is a warning, never
    an exception.

    Args:
        model: The model; held weakly. It is annotated while a window is recorded, unless it is already.
        schedule: Which steps (see `nvprof_kit._instrument.loop.switch.profiling_schedule`); ``"0:1"`` for one step.
        options: What to record, and where to write.
        on_trace_ready: Called with each trace and its window, after the profiler's own files are written.

    Attributes:
        enabled: Whether it does anything.

    Raises:
        UsageError: The schedule is none.
        ToolError: Utilisation is asked for and its libraries are not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Switch = None,
        options: LayerOptions = LayerOptions(),
        on_trace_ready: OnTraceReady | None = None,
    ) -> None:
        asked = profiling_schedule(schedule)
        self.options = options
        self.enabled = asked is not None and state.mode != "off"
        self._running = self._over = False
        self._step: Range | None = None
        if asked is not None and self.enabled:
            from nvprof_kit._profiler.window import WindowRecorder

            self._clock = StepClock()
            several = asked.repeat != 1
            self._recorder = WindowRecorder(weakref.ref(model), options, self._clock, several, on_trace_ready)
            self._windows = Windows(asked, self._recorder)

    @property
    def recorded(self) -> list[Recorded]:
        """What each window told, in order; the last 16 at most."""
        return list(self._recorder.recorded) if self.enabled else []

    def __enter__(self) -> LayerProfiler:
        """The loop begins, with its step 0."""
        if self.enabled and not self._over:
            self._running = True
            self._safely(self._begin)
        return self

    def step(self) -> None:
        """A step is over and the next begins."""
        if self._running:
            self._safely(self._next)

    def __exit__(self, *_exception: object) -> None:
        """The loop is over; a window that runs is written, after an exception too."""
        if self._running:
            self._safely(self._end)

    def __call__(self, function: F) -> F:
        """Decorate a function that does one step; the loop begins with its first call and ends with the program."""
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
        """Do something of our own; where it fails the profiler ends and the program goes on."""
        try:
            move()
        except Exception as error:
            self._running, self._over = False, True
            warnings.warn(f"LayerProfiler stops: {type(error).__name__}: {error}", stacklevel=3)
            self._recorder.cancel()

    def _begin(self) -> None:
        self._windows.__enter__()
        self._begin_step()

    def _next(self) -> None:
        self._end_step()
        self._windows.step()
        last = self._windows.schedule.last_step
        if last is not None and self._windows.step_number > last:
            self._running, self._over = False, True  # the rest of the loop costs nothing
        else:
            self._begin_step()

    def _end(self) -> None:
        self._running, self._over = False, True
        if self._windows.step_number:
            self._clock.skip()  # a step that was begun behind the last one
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
        if recorded and self.options.steps and state.backend is not None:
            number = self._windows.step_number
            self._step = Range(f"step {number}", Category.STEP, number)
            state.backend.open(self._step, self)
        if self._windows.action is not Action.WARMUP:
            self._clock.begin(recorded=recorded)

    def _end_step(self) -> None:
        self._clock.end()
        if self._step is not None and state.backend is not None:
            state.backend.close(self)
        self._step = None
