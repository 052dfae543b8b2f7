"""`LayerProfiler`: record and analyze some steps of a training loop in the process itself.

It writes time and memory of each layer in each step as trace, plots, tables and text, in one folder per rank.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from nvprof_kit._capture.recorder.record import OnTraceReady, Tool, record, tool_attached
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import annotate_model
from nvprof_kit._instrument.loop.loop import leave_to_program
from nvprof_kit._instrument.loop.schedule import Action, Schedule, Sink, Switch, Window, Windows
from nvprof_kit._instrument.memory.allocator import Boundaries, cuda_counts
from nvprof_kit._instrument.meters.utilisation import Utilisation
from nvprof_kit._instrument.modules.blocks import block_kinds, class_name, unwrapped
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import claim, mesh_of, rank, rank_folder
from nvprof_kit._instrument.session import Watch
from nvprof_kit._profiler.cost import OwnCost, StepClock
from nvprof_kit.errors import PATH, UsageError, require
from nvprof_kit.issues import Issue
from nvprof_kit.names import Category, encodable, step_number

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.profile import LayerProfile
    from nvprof_kit._instrument.meters.throughput import Throughput

F = TypeVar("F", bound=Callable[..., Any])

_NOT_BEGUN, _OVER = 0, -1
"""The process of a `LayerProfiler` before and after its loop; in it a forked child, which is another, does nothing."""

_KEPT = 16
"""Number of windows with tables kept in memory."""

MEMORY = {"step": "step", "layer": "layer", "phase": "phase", "allocated_bytes": "end"}
MEMORY |= {f"{size}_bytes": size for size in ("retained", "transient", "peak", "reserved")}
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

    _depth = 0

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


@dataclass(eq=False, repr=False)
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

    model: InitVar[nn.Module]
    schedule: InitVar[Switch] = None
    folder: str | Path = "traces"
    _: KW_ONLY
    name: str | None = None
    mesh: Any = None
    kinds: Mapping[str, str] | None = None
    stacks: bool = False
    shapes: bool = False
    allocations: bool = False
    memory: bool = True
    steps: bool = True
    plots: bool = True
    utilisation: bool = False
    throughput: Throughput[Any] | None = None
    echo: bool = True
    on_trace_ready: OnTraceReady | None = None

    def __post_init__(self, model: nn.Module, schedule: Switch) -> None:
        plan = Schedule.of(schedule)
        require(self.folder, PATH, "LayerProfiler: folder", "a path")
        self.enabled = plan is not None and session.mode != "off"
        self._process = _NOT_BEGUN
        self._step: Range | None = None
        if plan is not None and self.enabled:
            require(model, nn.Module, "LayerProfiler: model", "a torch.nn.Module")
            require(self.kinds, (Mapping, type(None)), "LayerProfiler: kinds", "a dict of kinds by pattern")
            self._clock = StepClock()
            self._recorder = _WindowRecorder(self, model, self._clock, several=plan.repeat != 1)
            self._windows = Windows(plan, self._recorder)

    @property
    def recorded(self) -> list[Recorded]:
        """The results of the last windows, at most 16, in order."""
        return list(self._recorder.recorded) if self.enabled else []

    def __enter__(self) -> LayerProfiler:
        """Begin the loop with step 0."""
        if self.enabled and self._process == _NOT_BEGUN:
            self._process = os.getpid()
            self._safely(self._begin)
        return self

    def step(self) -> None:
        """End the current step and begin the next."""
        if self._process == os.getpid():
            self._safely(self._next)

    def __exit__(self, *_exception: object) -> None:
        """End the loop; a running window is written, also after an exception."""
        if self._process == os.getpid():
            self._safely(self._end)

    def __call__(self, function: F) -> F:
        """Decorate a function that runs one step; the loop begins with the first call and ends at exit."""
        if not self.enabled:
            return function

        @functools.wraps(function)
        def one_step(*args: Any, **kwargs: Any) -> Any:
            if self._process == _NOT_BEGUN:
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
            self._process = _OVER
            warnings.warn(f"LayerProfiler stops: {type(error).__name__}: {error}", stacklevel=3)
            self._recorder.cancel()

    def _begin(self) -> None:
        if self.steps:
            leave_to_program(Category.STEP)
        self._windows.__enter__()
        self._begin_step()

    def _next(self) -> None:
        self._end_step()
        self._windows.step()
        last = self._windows.schedule.last_step
        if last is not None and self._windows.step_number > last:
            self._process = _OVER  # no overhead in the rest of the loop
        else:
            self._begin_step()

    def _end(self) -> None:
        self._process = _OVER
        if self._windows.step_number:
            self._clock.skip()  # the step that began after the last one
        self._end_step()
        self._windows.__exit__()
        if not self._recorder.seen:
            step, schedule = self._windows.step_number, self._windows.schedule
            warnings.warn(Issue.of("nothing-recorded:profiler", step=step, schedule=schedule), stacklevel=4)

    def _begin_step(self) -> None:
        recorded = self._windows.action.records
        if recorded and self.steps and session.backend is not None:
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


class _WindowRecorder(Sink):
    """Records the windows of a `LayerProfiler`, with the embedded recorder or an attached tool.

    Args:
        options: The profiler.
        model: The model; held weakly.
        clock: Times the steps.
        several: Whether there can be several windows, so that file names need the window's number.

    Attributes:
        recorded: The results of the last windows, in order.
        seen: Whether a window has begun.
    """

    def __init__(self, options: LayerProfiler, model: nn.Module, clock: StepClock, *, several: bool) -> None:
        self.recorded: deque[Recorded] = deque(maxlen=_KEPT)
        self.seen = False
        self._options, self._model, self._clock, self._several = options, weakref.ref(model), clock, several
        self._kinds = options.kinds or {}
        self._tool = Tool() if tool_attached() else None
        self._sampler = Utilisation() if options.utilisation else None
        self._undo = ExitStack()
        self._recorder: record | None = None
        self._prefix = Path()
        self._boundaries: _Memory | None = None
        self._block_kinds: dict[str, str] = {}
        self._plain: Sequence[int] = ()
        self._spent = {"set_up_ns": 0, "write_ns": 0, "read_ns": 0}

    def warm_up(self, window: Window) -> None:
        """Set up the profiler, and choose the output folder."""
        model, options = self._model(), self._options
        if self._tool is not None or model is None:
            return
        with self._timed("set_up_ns"):
            name = encodable(options.name or class_name(unwrapped(model)))
            folder = Path(options.folder) / rank_folder(options.mesh or mesh_of(model))
            number = f"_window{window.number + 1}" if self._several else ""
            self._prefix = claim(folder) / f"{name}{number}"
            self._block_kinds = block_kinds(model, self._kinds)
            self._recorder = record(
                self._path("trace.json.gz"), stacks=options.stacks, shapes=options.shapes, memory=options.allocations
            )
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
                self._undo.callback(annotate_model(model, steps=False).remove)
        if self._tool is not None:
            self._tool.start(window)
        if self._recorder is None:
            return
        with self._timed("set_up_ns"):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # work launched by earlier steps belongs to them
            self._plain = self._clock.take(recorded=False) or self._plain
            self._recorder.__enter__()
            self._undo.callback(self._recorder.__exit__, None, None, None)
            device = next((weight.device for weight in model.parameters() if weight.is_cuda), None)
            self._boundaries = None
            if self._options.memory and device is not None:
                self._boundaries = _Memory(functools.partial(cuda_counts, device))
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
        lengths = self._clock.take(recorded=True)
        with self._timed("read_ns"):
            profile = self._read(recorder.path, window)
        layer_kinds = set(profile.kinds["kind"])
        if missing := [encodable(rule) for rule, kind in self._kinds.items() if encodable(kind) not in layer_kinds]:
            warnings.warn(Issue.of("no-such-kind", kinds=", ".join(map(repr, missing))), stacklevel=2)
        cost = OwnCost(lengths, self._plain, **self._spent)
        self._spent = dict.fromkeys(self._spent, 0)
        first, last = window.first_step, window.last_step
        steps = f"step {first}" if last == first else f"steps {first} to {last}"
        facts = [f"{self._prefix.name} · rank {rank()} · {steps}", str(cost)]
        if self._sampler is not None:
            self._sampler.write(self._path("utilisation.csv"))
            facts += self._sampler.lines()
        if self._options.throughput is not None:
            facts += str(self._options.throughput.summary()).splitlines()
        with self._timed():
            write_file(self._path(f"rank_{rank()}.log"), text_of(profile_report(profile, facts), to_file=True))
            if self._options.echo and rank() == 0:
                print_to(sys.stdout, [*profile_head(profile, facts), f"Files: {self._path('*')}"])
            self.recorded.append(Recorded(window, recorder.path, profile, cost))
            if self._options.on_trace_ready is not None:
                self._options.on_trace_ready(recorder.path, window)

    def _path(self, table: str) -> Path:
        """The path of one of the window's files, which are named as in ProfilerTools."""
        return self._prefix.with_name(f"{self._prefix.name}_{table}")

    def _read(self, trace_path: Path, window: Window) -> LayerProfile:
        """Read the trace, and write the tables, the memory text and the plots."""
        import pandas as pd

        from nvprof_kit._analysis.layers.profile import layer_profile
        from nvprof_kit._report.plots.memory import curve_figure
        from nvprof_kit._report.plots.plots import encode as encode_figure
        from nvprof_kit._report.text.layer_profile import memory_lines, time_figure
        from nvprof_kit._result.formats import encode
        from nvprof_kit._result.writer import write_file
        from nvprof_kit._trace.open import open_capture

        trace = open_capture(trace_path, optional=("name",))
        if self._options.steps:
            # without nested step ranges, which are the loop's own and may be numbered differently, and without a step
            # after the last, which began after the loop's end
            ranges = trace.ranges.reset_index(drop=True)
            steps = ranges[ranges["category"] == Category.STEP.value].sort_values(["tid", "start_ns"])
            latest_end = steps.groupby("tid")["end_ns"].cummax().groupby(steps["tid"]).shift()
            number = steps["text"].astype(object).map(step_number)
            left_out = steps.index[(steps["end_ns"] <= latest_end) | (number > window.last_step)]
            trace = replace(trace, ranges=ranges.drop(index=left_out).reset_index(drop=True))
        seen = [] if self._boundaries is None else self._boundaries.seen
        memory = {column: [getattr(boundary, name) for boundary in seen] for column, name in MEMORY.items()}
        profile = layer_profile(trace, self._block_kinds, pd.DataFrame(memory) if seen else None)
        for name, table in (("layers", profile.rows), ("kinds", profile.kinds)):
            write_file(self._path(f"{name}.csv"), encode(table, "csv"))
        if seen:
            write_file(self._path("memory_usage.txt"), "\n".join([*memory_lines(profile.rows), ""]))
        if self._options.plots:
            try:
                plots = {"cuda_time_plot": time_figure(profile)}
                if seen:
                    plots["memory_usage_line_chart"] = curve_figure(seen)
                for name, figure in plots.items():
                    write_file(self._path(f"{name}.png"), encode_figure(figure, "png"))
            except Exception as error:  # a failed plot must not prevent the log
                text = f"curves of {self._prefix.name} are not drawn: {type(error).__name__}: {error}"
                warnings.warn(text, stacklevel=2)
        return profile

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
            if self._options.throughput is not None:
                self._options.throughput.leave_out(elapsed)
