"""One window of `LayerProfiler`: record, analyze, and write files to the rank's folder."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nvprof_kit._capture.recorder.record import OnTraceReady, RecordOptions, Tool, record, tool_attached
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.schedule import Sink, Window
from nvprof_kit._instrument.memory.allocator import Allocator, Boundaries, CudaAllocator
from nvprof_kit._instrument.modules.annotate import range_model
from nvprof_kit._instrument.modules.blocks import block_kinds, class_name, unwrapped
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import claim, mesh_of, rank, rank_folder
from nvprof_kit._instrument.session import Watch
from nvprof_kit._profiler.cost import OwnCost, StepClock
from nvprof_kit._profiler.files import WindowFiles
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category, encodable

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.profile import LayerProfile
    from nvprof_kit._instrument.meters.throughput import Throughput


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


class WindowRecorder(Sink):
    """Records the windows of a `LayerProfiler`, with the embedded recorder or an attached tool.

    The options are those of `LayerProfiler`, except:

    Args:
        model: Returns the model.
        clock: Times the steps.
        several: Whether there can be several windows, so that file names need the window's number.
        detail: What to record.
        own_steps: Whether the outermost step ranges are the profiler's.

    Attributes:
        recorded: The results of the last windows, in order.
        seen: Whether a window has begun.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        clock: StepClock,
        *,
        several: bool,
        folder: Path,
        name: str | None,
        mesh: Any,
        kinds: Mapping[str, str] | None,
        detail: RecordOptions,
        memory: bool,
        own_steps: bool,
        plots: bool,
        utilisation: bool,
        throughput: Throughput[Any] | None,
        echo: bool,
        on_trace_ready: OnTraceReady | None,
    ) -> None:
        self.recorded: deque[Recorded] = deque(maxlen=_KEPT)
        self.seen = False
        self._model, self._clock, self._several, self._folder = model, clock, several, folder
        self._name, self._mesh, self._rules, self._detail = name, mesh, kinds or {}, detail
        self._reads_memory, self._own_steps, self._plots, self._echo = memory, own_steps, plots, echo
        self._throughput, self._on_trace_ready = throughput, on_trace_ready
        self._tool = Tool() if tool_attached() else None
        self._sampler = None
        if utilisation:
            from nvprof_kit._instrument.meters.utilisation import Utilisation

            self._sampler = Utilisation()
        self._undo = ExitStack()
        self._recorder: record | None = None
        self._files: WindowFiles | None = None
        self._memory: _Memory | None = None
        self._kinds: dict[str, str] = {}
        self._plain: Sequence[int] = ()
        self._spent = {"set_up_ns": 0, "write_ns": 0, "read_ns": 0}

    def warm_up(self, window: Window) -> None:
        """Set up the profiler, and choose the output folder."""
        model = self._model()
        if self._tool is not None or model is None:
            return
        with self._timed("set_up_ns"):
            name = encodable(self._name or class_name(unwrapped(model)))
            folder = self._folder / rank_folder(self._mesh or mesh_of(model))
            number = f"_window{window.number + 1}" if self._several else ""
            self._files = WindowFiles(claim(folder), f"{name}{number}", rank())
            self._kinds = block_kinds(model, self._rules)
            self._recorder = record(self._files.trace, **vars(self._detail))
            self._recorder.warm_up()

    def start(self, window: Window) -> None:
        """Record."""
        self.seen = True
        if self._recorder is None:
            self.warm_up(window)
        model = self._model()
        if model is None:
            return
        with self._timed("set_up_ns"), suppress(UsageError):  # part of the model is already annotated
            if model not in session.annotated:
                self._undo.callback(range_model(model).remove)
        if self._tool is not None:
            self._tool.start(window)
        elif self._recorder is not None:
            with self._timed("set_up_ns"):
                self._record(model, self._recorder)

    def _record(self, model: nn.Module, recorder: record) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # work launched by earlier steps belongs to them
        self._plain = self._clock.take(recorded=False) or self._plain
        recorder.__enter__()
        self._undo.callback(recorder.__exit__, None, None, None)
        device = _cuda_device(model)
        self._memory = None
        if self._reads_memory and device is not None:
            self._memory = _Memory(CudaAllocator(device))
            watch = Watch(self._memory)
            watch.attach()
            self._undo.callback(watch.detach)
        if self._sampler is not None:
            self._sampler.start()
            self._undo.callback(self._sampler.stop)

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
            last_step = window.last_step if self._own_steps else None
            profile = self._files.read(self._kinds, seen, last_step=last_step, draw=self._plots)
        layer_kinds = set(profile.kinds["kind"])
        if missing := [encodable(rule) for rule, kind in self._rules.items() if encodable(kind) not in layer_kinds]:
            warnings.warn(
                f"LayerProfiler(kinds=...): no layer that ran matches {', '.join(map(repr, missing))}; needed a "
                "pattern of a class or of a path in the table of all layers",
                stacklevel=2,
            )
        cost = OwnCost(lengths, self._plain, **self._spent)
        self._spent = dict.fromkeys(self._spent, 0)
        steps = f"step {window.first_step}"
        if window.last_step > window.first_step:
            steps = f"steps {window.first_step} to {window.last_step}"
        facts = [f"{self._files.name} · rank {rank()} · {steps}", str(cost)]
        if self._sampler is not None:
            self._sampler.write(self._files.path("utilisation.csv"))
            facts += self._sampler.lines()
        if self._throughput is not None:
            facts += str(self._throughput.summary()).splitlines()
        with self._timed():
            self._files.write_log(profile, facts, echo=self._echo)
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

    @contextmanager
    def _timed(self, cost_name: str = "") -> Iterator[None]:
        """Add the time of a block to one of the costs, if any; it is no time of the program's throughput."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            elapsed = time.perf_counter_ns() - start
            if cost_name:
                self._spent[cost_name] += elapsed
            if self._throughput is not None:
                self._throughput.leave_out(elapsed)


def _cuda_device(model: nn.Module) -> torch.device | None:
    """The CUDA device of one of the model's parameters; None if there is none."""
    return next((weight.device for weight in model.parameters() if weight.is_cuda), None)
