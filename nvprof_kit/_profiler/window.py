"""One window of `LayerProfiler`: record, analyze, and write files to the rank's folder."""

from __future__ import annotations

import functools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from nvprof_kit._capture.recorder.record import Nothing, OnTraceReady, Tool, record, tool_attached
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.schedule import Window
from nvprof_kit._instrument.loop.step_clock import StepClock
from nvprof_kit._instrument.memory.boundaries import Allocator, Boundaries, CudaAllocator
from nvprof_kit._instrument.modules.annotate import range_model
from nvprof_kit._instrument.modules.blocks import block_kinds, class_name, unwrapped
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit._instrument.rank_claim import claim
from nvprof_kit._instrument.ranks import mesh_of, rank, rank_folder
from nvprof_kit._instrument.session import Watch
from nvprof_kit._profiler.files import WindowFiles
from nvprof_kit._profiler.own_cost import OwnCost
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category, encodable

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.profile import LayerProfile
    from nvprof_kit._instrument.meters.utilisation import Utilisation
    from nvprof_kit._profiler.options import LayerOptions


_KEPT = 16
"""Number of windows with tables kept in memory."""


@dataclass(frozen=True)
class Recorded:
    """The results of one window.

    Attributes:
        window: The steps of the window.
        trace: The trace.
        profile: The tables.
        cost: The overhead of recording.
    """

    window: Window
    trace: Path
    profile: LayerProfile
    cost: OwnCost


class _Memory(Boundaries):
    """Allocator counters at each begin and end of a layer, by its outermost step range."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__(allocator)
        self._depth = 0

    def entered(self, range_: Range) -> None:
        """Called at the begin of a range; a step range sets the current step."""
        if range_.category is Category.STEP:
            if self._depth == 0 and range_.payload is not None:
                self.step = range_.payload
            self._depth += 1
        super().entered(range_)

    def left(self, range_: Range) -> None:
        """Called at the end of a range."""
        self._depth -= range_.category is Category.STEP
        super().left(range_)


def _own_time(
    method: Callable[[WindowRecorder, Window], None],
) -> Callable[[WindowRecorder, Window], None]:
    """Exclude a method's time from the program's throughput meter."""

    @functools.wraps(method)
    def timed(self: WindowRecorder, window: Window) -> None:
        meter = None if self._inside else self._options.throughput
        start, inside, self._inside = time.perf_counter_ns(), self._inside, True
        try:
            method(self, window)
        finally:
            self._inside = inside
            if meter is not None:
                meter.leave_out(time.perf_counter_ns() - start)

    return timed


class WindowRecorder(Nothing):
    """Records the windows of a `LayerProfiler`, with the embedded recorder or an attached tool.

    Args:
        model: The model.
        options: What to record, and where to write.
        clock: Times the steps.
        several: Whether there can be several windows, so that file names need the window's number.
        on_trace_ready: Called with each trace and its window.

    Attributes:
        recorded: The results of the last windows, in order.
        seen: Whether a window has begun.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        options: LayerOptions,
        clock: StepClock,
        several: bool,
        on_trace_ready: OnTraceReady | None,
    ) -> None:
        self.recorded: deque[Recorded] = deque(maxlen=_KEPT)
        self.seen = False
        self._model, self._options, self._clock, self._several = model, options, clock, several
        self._on_trace_ready = on_trace_ready
        self._tool = Tool() if tool_attached() else None
        self._sampler = _sampler() if options.utilisation else None
        self._undo = ExitStack()
        self._recorder: record | None = None
        self._files: WindowFiles | None = None
        self._memory: _Memory | None = None
        self._kinds: dict[str, str] = {}
        self._plain: Sequence[int] = ()
        self._spent: dict[str, int] = {}
        self._inside = False

    @_own_time
    def warm_up(self, window: Window) -> None:
        """Set up the profiler, and choose the output folder."""
        model = self._model()
        if self._tool is not None or model is None:
            return
        with self._timed("set_up_ns"):
            name = encodable(self._options.name or class_name(unwrapped(model)))
            folder = self._options.folder / rank_folder(self._options.mesh or mesh_of(model))
            number = f"_window{window.number + 1}" if self._several else ""
            self._files = WindowFiles(claim(folder), f"{name}{number}", rank())
            self._kinds = block_kinds(model, self._options.kinds)
            self._recorder = record(self._files.trace, **vars(self._options.record))
            self._recorder.warm_up()

    @_own_time
    def start(self, window: Window) -> None:
        """Record."""
        self.seen = True
        if self._recorder is None:
            self.warm_up(window)
        model = self._model()
        if model is None:
            return
        with suppress(UsageError):  # part of the model is already annotated
            if model not in session.annotated:
                self._undo.callback(range_model(model).remove)
        if self._tool is not None:
            self._tool.start(window)
        elif self._recorder is not None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # work launched by earlier steps belongs to them
            self._plain = self._clock.take(recorded=False) or self._plain
            self._recorder.__enter__()
            self._undo.callback(self._recorder.__exit__, None, None, None)
            self._watch(model)
            if self._sampler is not None:
                self._sampler.start()
                self._undo.callback(self._sampler.stop)

    @_own_time
    def stop(self, window: Window) -> None:
        """Write the trace, analyze it, and write the results."""
        if self._tool is not None:
            self._tool.stop(window)
        with self._timed("write_ns"):
            self._undo.close()
        recorder, self._recorder = self._recorder, None
        if recorder is None or self._files is None or not recorder.written:
            return
        lengths = self._clock.take(recorded=True)
        with self._timed("read_ns"):
            seen = [] if self._memory is None else self._memory.seen
            last_step = window.last_step if self._options.steps else None
            profile = self._files.read(self._kinds, seen, last_step=last_step, draw=self._options.plots)
        self._warn_of_kinds(set(profile.kinds["kind"]))
        cost = OwnCost(lengths, self._plain, **self._spent)
        self._spent = {}
        self._files.write_log(profile, self._facts(window, cost), echo=self._options.echo)
        self.recorded.append(Recorded(window, self._files.trace, profile, cost))
        if self._on_trace_ready is not None:
            self._on_trace_ready(self._files.trace, window)

    def cancel(self) -> None:
        """End a warm-up without a window, a window without steps, or an active recording after an error."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            with suppress(Exception):
                recorder.cancel()
        with suppress(Exception):
            self._undo.close()
        if self._tool is not None:
            self._tool.cancel()

    def _warn_of_kinds(self, ran: set[str]) -> None:
        """Warn of kinds of the user that no recorded layer has."""
        rules = self._options.kinds or {}
        if missing := [encodable(pattern) for pattern, kind in rules.items() if encodable(kind) not in ran]:
            warnings.warn(
                f"LayerProfiler(kinds=...): no layer that ran matches {', '.join(map(repr, missing))}; needed a "
                "pattern of a class or of a path in the table of all layers",
                stacklevel=2,
            )

    def _watch(self, model: nn.Module) -> None:
        device = _cuda_device(model)
        self._memory = None
        if self._options.memory and device is not None:
            self._memory = _Memory(CudaAllocator(device))
            watch = Watch(self._memory)
            watch.attach()
            self._undo.callback(watch.detach)

    def _facts(self, window: Window, cost: OwnCost) -> list[str]:
        steps = f"step {window.first_step}"
        if window.last_step > window.first_step:
            steps = f"steps {window.first_step} to {window.last_step}"
        lines = [f"{self._files.name if self._files else ''} · rank {rank()} · {steps}", str(cost)]
        if self._sampler is not None and self._files is not None:
            self._sampler.write(self._files.path("utilisation.csv"))
            lines += self._sampler.lines()
        if self._options.throughput is not None:
            lines += str(self._options.throughput.summary()).splitlines()
        return lines

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spent[what] = time.perf_counter_ns() - start


def _sampler() -> Utilisation:
    from nvprof_kit._instrument.meters.utilisation import Utilisation

    return Utilisation()


def _cuda_device(model: nn.Module) -> torch.device | None:
    """The CUDA device of one of the model's parameters; None if there is none."""
    return next((weight.device for weight in model.parameters() if weight.is_cuda), None)
