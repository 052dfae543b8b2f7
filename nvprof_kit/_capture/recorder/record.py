"""The embedded recorder: PyTorch's profiler (Kineto), for machines without Nsight Systems.

The trace opens in Perfetto, TensorBoard and Holistic Trace Analysis unchanged, and `nvprof-kit layers` reads it.
Annotated models emit ranges only while a recording runs.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from nvprof_kit._instrument import session
from nvprof_kit._instrument.flops.count import watch_again
from nvprof_kit._instrument.loop.schedule import Schedule, Sink, Switch, Window, Windows
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import mark_rank, rank, world_size
from nvprof_kit._instrument.session import Backend, Kineto, Watch
from nvprof_kit.errors import PATH, ToolError, UsageError, require
from nvprof_kit.issues import Issue
from nvprof_kit.names import WINDOW, Category

OnTraceReady = Callable[[Path, Window], object]
"""Called with each window's trace after it is written."""

_DEFAULT = Path("run.json.gz")

_END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals from a user, a scheduler or a closed terminal that end a program."""

_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""What keeps the lines that Kineto logs for its own developers out of the terminal, unless the user asks for a level.

Kineto reads it when it is first used. No lower level leaves out the lines of STAGE and USDT; what stops a recording is
said by `record`.
"""

_running: record | None = None


class record(ContextDecorator):
    """Record the program's work in a block, or some steps of its loop; a context manager and a decorator.

    ```python
    with nvprof_kit.record("run.json.gz"):              # everything in the block
        train(batch)

    with nvprof_kit.record(schedule="stable") as recording:
        for batch in loader:
            train(batch)
            recording.step()
    ```

    Without a schedule, PyTorch's profiler records the block into a Kineto trace. It is written when the block ends,
    also after an exception, and appears only when it is complete. If it cannot be written (a full disk), a warning says
    so and `written` stays False. SIGINT, SIGTERM and SIGHUP are delayed while it is written. A decorated function
    rewrites the trace at each call.

    With a schedule, consecutive recorded steps are a window. Under nsys or ncu, each window calls cudaProfilerStart and
    cudaProfilerStop, and is an NVTX range ``window`` in the domain ``nvprof_kit``; the tool can capture either (nsys:
    ``--capture-range``), as ``nvprof-kit profile --schedule`` does. Without a tool, each window is a trace. If a
    recording is already running, as under ``nvprof-kit record``, a warning says that the windows get no traces.

    Args:
        path: File to write, ``.json`` or ``.json.gz``; an existing file is replaced. By default ``run.json.gz``, or
            ``run.rank3.json.gz`` in a multi-rank program. With several windows, ``run.1.json.gz``, ….
        schedule: Which steps of the loop, in any form of `nvprof_kit.Schedule.of`; None reads ``NVPROF_KIT_SCHEDULE``,
            and records nothing if it is not set. ``all`` records the block.
        stacks: Also the Python call stack of each operator (``with_stack`` of `torch.profiler.profile`). Each of the
            three makes the trace larger and the program slower.
        shapes: Also the input shapes of each operator (``record_shapes``).
        memory: Also each allocation and release (``profile_memory``).
        on_trace_ready: Called with each window's trace and its window. If it fails, a warning says so and the loop
            continues.

    Attributes:
        written: Whether the trace of the block has been written.
        empty: Whether the written trace has no event: nothing of PyTorch ran.

    Raises:
        UsageError: The schedule or the path is invalid. On entry, or when a window begins: the path cannot be written,
            or a recording is already running.
        ToolError: On entry, or when a window begins: PyTorch is not installed.
    """

    shares_path: ClassVar[bool] = False
    """Whether other processes write traces of the same path: the first keeps it, later ones add their number."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        schedule: Switch | Literal["all"] = "all",
        stacks: bool = False,
        shapes: bool = False,
        memory: bool = False,
        on_trace_ready: OnTraceReady | None = None,
    ) -> None:
        requested_path = None if path is None else Path(require(path, PATH, "record: path", "a path"))
        self.path = (requested_path or _DEFAULT).absolute()
        self._detail = {"stacks": stacks, "shapes": shapes, "memory": memory}
        self.written = False
        self.empty = False
        self._adds_rank_to_path = path is None
        self._profiler: Any = None
        self._started = False
        self._process = os.getpid()
        self._listener: Backend | None = None
        self._windows: Windows | None = None
        if schedule != "all":
            parsed_schedule = Schedule.of(schedule)
            sink = Sink()
            if parsed_schedule is not None and tool_attached():
                sink = Tool()
            elif parsed_schedule is not None:
                sink = Traces(requested_path, parsed_schedule.repeat != 1, self._detail, on_trace_ready)
            self._windows = Windows(parsed_schedule or Schedule(), sink)

    def step(self) -> None:
        """End the current step of the loop and begin the next."""
        if self._windows is not None:
            self._windows.step()

    def warm_up(self) -> None:
        """Set up the profiler some steps before the recording, so that the setup does not slow down the first recorded
        step.

        Raises:
            UsageError: The path cannot be written, or a recording is already running.
            ToolError: PyTorch is not installed.
        """
        global _running
        if self._adds_rank_to_path:
            self.path, self._adds_rank_to_path = of_rank(self.path), False
        check_path(self.path)
        if _running is not None:
            raise UsageError(f"cannot record {self.path}: {_running.path} is being recorded; end that recording first")
        if self._detail["stacks"] and sys.version_info >= (3, 12):
            # With stacks, PyTorch 2.4 cannot end a recording in which annotations and optimizers imported this: "Python
            # replay stack is empty", https://github.com/pytorch/pytorch/issues/101632.
            with suppress(ImportError):  # also without torch, which is said later
                import torch._dynamo  # noqa: F401
        profiler = _new_profiler(**self._detail)
        asks_for_level = _LOG_LEVEL in os.environ
        os.environ.setdefault(_LOG_LEVEL, "6")
        try:
            with warnings.catch_warnings():
                # PyTorch 2.11 warns before any cycle that it will forget the events of earlier ones
                warnings.filterwarnings("ignore", message=".*Profiler clears events")
                profiler.prepare_trace()
        finally:
            if not asks_for_level:
                del os.environ[_LOG_LEVEL]
        _running, self._profiler, self._process = self, profiler, os.getpid()

    def cancel(self) -> None:
        """Discard a warm-up or a recording; nothing is written."""
        global _running
        if self._profiler is None:
            return
        if self._started:
            self._stop_ranges()
        profiler, self._profiler, _running = self._profiler, None, None
        if os.getpid() != self._process:
            return
        if not self._started:
            profiler.start_trace()
        self._started = False
        profiler.stop_trace()

    def _stop_ranges(self) -> None:
        """Stop emitting ranges, or return them to an enclosing memory profiler."""
        session.deactivate()
        listener, self._listener = self._listener, None
        if isinstance(listener, Watch) and listener.attached:
            session.activate(listener)
        watch_again()

    def __enter__(self) -> record:
        """Start recording, or begin the loop with step 0.

        If nsys or ncu is attached, a recording without a schedule warns and records nothing.
        """
        if self._windows is not None:
            self._windows.__enter__()
            return self
        if tool_attached():
            warnings.warn(Issue.of("nsight-attached", name=self.path.name), stacklevel=2)
            return self
        if self._profiler is None:
            self.warm_up()
        self._profiler.start_trace()
        self._started = True
        self._listener = session.backend
        session.activate(Kineto())
        watch_again()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop and write the trace; a forked process leaves that to its parent."""
        global _running
        if self._windows is not None:
            self._windows.__exit__(kind, error, traceback)
            return
        if self._profiler is None:
            return
        self._stop_ranges()
        self._started = False
        profiler, self._profiler, _running = self._profiler, None, None
        if os.getpid() != self._process:
            return
        if not _is_enabled():
            warnings.warn(Issue.of("profiler-used", name=self.path.name), stacklevel=2)
            return
        with waiting_signals():
            profiler.stop_trace()
            try:
                path, self.empty = _export(profiler, self.path, shares_path=self.shares_path)
            except OSError as failure:  # a failed write must not end the program
                warnings.warn(f"{self.path} is not written: {failure.strerror or failure}", stacklevel=2)
                return
            self.written = path is not None
            self.path = path or self.path


class Tool(Sink):
    """Starts and stops the capture of nsys and ncu at each window."""

    def __init__(self) -> None:
        self._range = Range(WINDOW, Category.USER)
        self._started: Any = None

    def start(self, _window: Window) -> None:
        """Begin a window after the GPU has completed the work of earlier steps."""
        if (cuda := _cuda()) is not None:
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


class Traces(Sink):
    """The embedded recorder, with one trace per window; `numbered` adds the window's number to the file's name."""

    def __init__(
        self, path: str | Path | None, numbered: bool, detail: Mapping[str, Any], on_trace_ready: OnTraceReady | None
    ) -> None:
        self._path = path
        self._numbered = numbered
        self._detail = detail
        self._on_trace_ready = on_trace_ready
        self._recorder: record | None = None

    def warm_up(self, window: Window) -> None:
        """Set up the profiler."""
        if (outer := running()) is not None:
            warnings.warn(Issue.of("recorded-already", name=outer.path.name, step=window.first_step), stacklevel=4)
            return
        path = Path(self._path or of_rank(_DEFAULT))
        if self._numbered:
            path = part_of(path, str(window.number + 1))  # numbered from 1 like the reports of nsys
        self._recorder = record(path, **self._detail)
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
        if recorder is None:
            return
        try:
            recorder.__exit__(None, None, None)
        finally:  # also if a delayed signal ends the program
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


@contextmanager
def waiting_signals() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the end of the block; they then take their normal effect.

    Has no effect outside the main thread, where Python cannot set handlers, and for ignored signals.
    """
    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in _END_SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:
                handlers[number] = handler
                signal.signal(number, lambda received_signal, _frame: received.append(received_signal))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError, OSError):
                signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def running() -> record | None:
    """The recording that is running or warmed up in this process."""
    return _running


def tool_attached() -> bool:
    """Whether this process runs under nsys or ncu, so that a CUDA profiler is already attached."""
    return session.tool_attached(os.environ) or "CUDA_INJECTION64_PATH" in os.environ


def part_of(path: Path, label: str) -> Path:
    """The trace path of a rank or a window: ``run.rank3.json.gz`` of ``run.json.gz``."""
    name, dot, suffix = path.name.partition(".json")
    return path.with_name(f"{name}.{label}{dot}{suffix}")


def of_rank(path: Path) -> Path:
    """The trace of this process: ``run.rank3.json.gz`` in a multi-rank program, else the path itself."""
    return part_of(path, f"rank{rank()}") if world_size() > 1 else path


def check_path(path: Path) -> None:
    """Check that a trace can be written, before the program runs.

    Raises:
        UsageError: The path has another suffix, is a directory, or is in a missing or read-only directory.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise UsageError(f"{path}: a recording is a Kineto trace; name it .json or .json.gz")
    if path.is_dir():
        raise UsageError(f"{path}: a directory; needed a file name")
    if not os.access(path.parent, os.W_OK):
        obstacle = (
            "no permission to write there" if path.parent.exists() else f"no directory {path.parent}; make it first"
        )
        raise UsageError(f"{path}: {obstacle}")


def _new_profiler(*, stacks: bool, shapes: bool, memory: bool) -> Any:
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        raise ToolError(f"recording needs PyTorch, which cannot be imported ({error}); pip install torch") from None
    if _is_enabled():
        raise UsageError("PyTorch's profiler is already running, and only one can run at a time; stop it first")
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    from torch._C._profiler import _ExperimentalConfig

    settings: dict[str, Any] = {"profile_all_threads": True}
    if stacks:
        settings["record_python_gc_info"] = True
    config = None
    while settings and config is None:
        try:
            config = _ExperimentalConfig(**settings)
        except TypeError:  # an older PyTorch lacks the last option
            settings.popitem()
    # without acc_events: it would make PyTorch read all events into Python at stop, which is not needed here and fails
    # if a stack has an undecodable name (UnicodeDecodeError in PyTorch 2.13)
    return profile(
        activities=kinds, with_stack=stacks, record_shapes=shapes, profile_memory=memory, experimental_config=config
    )


def _is_enabled() -> bool:
    """Whether PyTorch's profiler is running, on this thread or on all."""
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled)


_EVENT = re.compile(rb'"cat": "(?!Trace")')
"""An event of the program; PyTorch writes one of the recording itself into every trace."""


def _export(profiler: Any, path: Path, *, shares_path: bool) -> tuple[Path | None, bool]:
    """Write the trace to a temporary name and rename it, so that readers never see a partial file.

    Returns:
        Where it is, None if other processes share the path and it has no event; and whether it has none. Such a trace
        has a few kilobytes of names, and larger ones are not searched.
    """
    partial = plain = path.with_name(f".{path.name}.{os.getpid()}.json")
    packed = plain.with_name(f"{plain.name}.gz")
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.exists() or not plain.stat().st_size:
            raise OSError("PyTorch could not write it; is the disk full?")
        empty = plain.stat().st_size < 1 << 16 and not _EVENT.search(plain.read_bytes())
        if path.name.endswith(".gz"):
            # the fastest level: a third larger than with the default level, in a tenth of the time
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            partial = packed
        if shares_path:
            if empty:
                return None, True
            try:
                os.link(partial, path)  # which fails where a trace is, unlike a replacement
                return path, False
            except FileExistsError:
                path = part_of(path, str(os.getpid()))
            except OSError:  # a file system without links
                pass
        partial.replace(path)
        return path, empty
    finally:
        for temporary in (plain, packed, plain.with_name(f"{plain.name}.tmp")):  # PyTorch leaves the last if it fails
            temporary.unlink(missing_ok=True)


def _cuda() -> Any:
    """``torch.cuda`` if the program uses it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
