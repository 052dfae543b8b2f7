"""One window of `LayerProfiler`: record, analyze, and write files to the rank's folder."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nvprof_kit._capture.recorder.record import OnTraceReady, RecordOptions, Tool, record, tool_attached
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.schedule import Sink, Window
from nvprof_kit._instrument.memory.allocator import Allocator, Boundaries, Boundary, CudaAllocator
from nvprof_kit._instrument.modules.annotate import range_model
from nvprof_kit._instrument.modules.blocks import block_kinds, class_name, unwrapped
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import claim, mesh_of, rank, rank_folder
from nvprof_kit._instrument.session import Watch
from nvprof_kit._profiler.cost import OwnCost, StepClock
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category, encodable, step_number

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.profile import LayerProfile
    from nvprof_kit._instrument.meters.throughput import Throughput
    from nvprof_kit._trace.schema import Trace


_KEPT = 16
"""Number of windows with tables kept in memory."""

MEMORY = {
    "step": "step",
    "layer": "layer",
    "phase": "phase",
    "allocated_bytes": "end",
    "retained_bytes": "retained",
    "transient_bytes": "transient",
    "peak_bytes": "peak",
    "reserved_bytes": "reserved",
}
"""The columns of the table of memory, and the attributes of `Boundary` in them."""


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


@dataclass(eq=False, kw_only=True)
class WindowRecorder(Sink):
    """Records the windows of a `LayerProfiler`, with the embedded recorder or an attached tool.

    The options are those of `LayerProfiler`, except:

    Attributes:
        model: Returns the model.
        clock: Times the steps.
        several: Whether there can be several windows, so that file names need the window's number.
        detail: What to record.
        range_steps: Whether the outermost step ranges are the profiler's.
        recorded: The results of the last windows, in order.
        seen: Whether a window has begun.
    """

    model: Callable[[], nn.Module | None]
    clock: StepClock
    several: bool
    folder: Path
    name: str | None
    mesh: Any
    kinds: Mapping[str, str]
    detail: RecordOptions
    memory: bool
    range_steps: bool
    plots: bool
    utilisation: bool
    throughput: Throughput[Any] | None
    echo: bool
    on_trace_ready: OnTraceReady | None

    def __post_init__(self) -> None:
        self.recorded: deque[Recorded] = deque(maxlen=_KEPT)
        self.seen = False
        self._tool = Tool() if tool_attached() else None
        self._sampler = None
        if self.utilisation:
            from nvprof_kit._instrument.meters.utilisation import Utilisation

            self._sampler = Utilisation()
        self._undo = ExitStack()
        self._recorder: record | None = None
        self._prefix = Path()
        self._boundaries: _Memory | None = None
        self._block_kinds: dict[str, str] = {}
        self._plain: Sequence[int] = ()
        self._spent = {"set_up_ns": 0, "write_ns": 0, "read_ns": 0}

    def warm_up(self, window: Window) -> None:
        """Set up the profiler, and choose the output folder."""
        model = self.model()
        if self._tool is not None or model is None:
            return
        with self._timed("set_up_ns"):
            name = encodable(self.name or class_name(unwrapped(model)))
            folder = self.folder / rank_folder(self.mesh or mesh_of(model))
            number = f"_window{window.number + 1}" if self.several else ""
            self._prefix = claim(folder) / f"{name}{number}"
            self._block_kinds = block_kinds(model, self.kinds)
            self._recorder = record(self._path("trace.json.gz"), **vars(self.detail))
            self._recorder.warm_up()

    def start(self, window: Window) -> None:
        """Record."""
        self.seen = True
        if self._recorder is None:
            self.warm_up(window)
        model = self.model()
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
        self._plain = self.clock.take(recorded=False) or self._plain
        recorder.__enter__()
        self._undo.callback(recorder.__exit__, None, None, None)
        device = next((weight.device for weight in model.parameters() if weight.is_cuda), None)
        self._boundaries = None
        if self.memory and device is not None:
            self._boundaries = _Memory(CudaAllocator(device))
            watch = Watch(self._boundaries)
            watch.attach()
            self._undo.callback(watch.detach)
        if self._sampler is not None:
            self._sampler.start()
            self._undo.callback(self._sampler.stop)

    def stop(self, window: Window) -> None:
        """Write the trace, analyze it, and write the results; rank 0 prints the head of the log."""
        from nvprof_kit._report.text.layer_profile import profile_head, profile_report
        from nvprof_kit._report.text.table import print_to, text_of
        from nvprof_kit._result.writer import write_file

        if self._tool is not None:
            self._tool.stop(window)
        with self._timed("write_ns"):
            self._undo.close()
        recorder, self._recorder = self._recorder, None
        if recorder is None or not recorder.written:
            return
        lengths = self.clock.take(recorded=True)
        with self._timed("read_ns"):
            profile = self._read(recorder.path, window)
        layer_kinds = set(profile.kinds["kind"])
        if missing := [encodable(rule) for rule, kind in self.kinds.items() if encodable(kind) not in layer_kinds]:
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
        facts = [f"{self._prefix.name} · rank {rank()} · {steps}", str(cost)]
        if self._sampler is not None:
            self._sampler.write(self._path("utilisation.csv"))
            facts += self._sampler.lines()
        if self.throughput is not None:
            facts += str(self.throughput.summary()).splitlines()
        with self._timed():
            write_file(self._path(f"rank_{rank()}.log"), text_of(profile_report(profile, facts), to_file=True))
            if self.echo and rank() == 0:
                print_to(sys.stdout, [*profile_head(profile, facts), f"Files: {self._path('*')}"])
            self.recorded.append(Recorded(window, recorder.path, profile, cost))
            if self.on_trace_ready is not None:
                self.on_trace_ready(recorder.path, window)

    def _path(self, table: str) -> Path:
        """The path of one of the window's files, which are named as in ProfilerTools."""
        return self._prefix.with_name(f"{self._prefix.name}_{table}")

    def _read(self, trace_path: Path, window: Window) -> LayerProfile:
        """Read the trace, and write the tables, the memory text and the plots."""
        import pandas as pd

        from nvprof_kit._analysis.layers.profile import layer_profile
        from nvprof_kit._report.text.layer_profile import memory_lines
        from nvprof_kit._result.formats import encode
        from nvprof_kit._result.writer import write_file
        from nvprof_kit._trace.open import open_capture

        trace = open_capture(trace_path, optional=("name",))
        if self.range_steps:
            trace = _with_outermost_steps(trace, window.last_step)
        seen = [] if self._boundaries is None else self._boundaries.seen
        memory = {column: [getattr(boundary, name) for boundary in seen] for column, name in MEMORY.items()}
        profile = layer_profile(trace, self._block_kinds, pd.DataFrame(memory) if seen else None)
        for name, table in (("layers", profile.rows), ("kinds", profile.kinds)):
            write_file(self._path(f"{name}.csv"), encode(table, "csv"), inputs=[trace_path])
        if seen:
            text = "\n".join(memory_lines(profile.rows))
            write_file(self._path("memory_usage.txt"), f"{text}\n", inputs=[trace_path])
        if self.plots:
            try:
                self._draw(profile, seen)
            except Exception as error:  # a failed plot must not prevent the log
                text = f"curves of {self._prefix.name} are not drawn: {type(error).__name__}: {error}"
                warnings.warn(text, stacklevel=2)
        return profile

    def _draw(self, profile: LayerProfile, boundaries: Sequence[Boundary]) -> None:
        from nvprof_kit._report.plots.memory import curve_figure
        from nvprof_kit._report.plots.plots import encode
        from nvprof_kit._report.text.layer_profile import time_figure
        from nvprof_kit._result.writer import write_file

        write_file(self._path("cuda_time_plot.png"), encode(time_figure(profile), "png"))
        if boundaries:
            write_file(self._path("memory_usage_line_chart.png"), encode(curve_figure(boundaries), "png"))

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
            if self.throughput is not None:
                self.throughput.leave_out(elapsed)


def _with_outermost_steps(trace: Trace, last_step: int) -> Trace:
    """The trace with only the outermost step ranges, up to a last step.

    A nested step range is the loop's own and may be numbered differently; a step after the last began after the loop's
    end.
    """
    ranges = trace.ranges.reset_index(drop=True)
    steps = ranges[ranges["category"] == Category.STEP.value].sort_values(["tid", "start_ns"])
    latest_end = steps.groupby("tid")["end_ns"].cummax().groupby(steps["tid"]).shift()
    number = steps["text"].astype(object).map(step_number)
    nested = steps.index[(steps["end_ns"] <= latest_end) | (number > last_step)]
    return replace(trace, ranges=ranges.drop(index=nested).reset_index(drop=True))
