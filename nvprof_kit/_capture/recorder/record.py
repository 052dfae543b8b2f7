"""The embedded recorder: PyTorch's profiler (Kineto), for machines without Nsight Systems.

The trace opens in Perfetto, TensorBoard and Holistic Trace Analysis unchanged, and `nvprof-kit layers` reads it.
Annotated models emit ranges only while a recording runs.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nvprof_kit._capture.recorder.signals import waiting_signals
from nvprof_kit._instrument import session
from nvprof_kit._instrument.flops.count import watch_again
from nvprof_kit._instrument.ranges.backends import Backend, Kineto
from nvprof_kit._instrument.session import Watch
from nvprof_kit.errors import ToolError, UsageError

_running: record | None = None


@dataclass(frozen=True)
class RecordOptions:
    """What to record besides operators, kernels and ranges, see `record`."""

    stacks: bool = False
    shapes: bool = False
    memory: bool = False


class record(ContextDecorator):
    """Record part of the program into a Kineto trace; a context manager and a decorator.

    The trace is written when the block ends, also after an exception, and appears only when it is complete. If it
    cannot be written (a full disk), a warning says so and `written` stays False. SIGINT, SIGTERM and SIGHUP are delayed
    while it is written. A decorated function rewrites the trace at each call.

    Args:
        path: File to write, ``.json`` or ``.json.gz``; an existing file is replaced.
        stacks: Also the Python call stack of each operator (``with_stack`` of `torch.profiler.profile`). Each of the
            three makes the trace larger and the program slower.
        shapes: Also the input shapes of each operator (``record_shapes``).
        memory: Also each allocation and release (``profile_memory``).

    Attributes:
        written: Whether the trace has been written.
        empty: Whether the written trace has no event: nothing of PyTorch ran.

    Raises:
        UsageError: On entry: the path cannot be written, or a recording is already running.
        ToolError: On entry: PyTorch is not installed.
    """

    def __init__(self, path: str | Path, *, stacks: bool = False, shapes: bool = False, memory: bool = False) -> None:
        self.path = Path(path).absolute()
        self.options = RecordOptions(stacks, shapes, memory)
        self.written = False
        self.empty = False
        self._profiler: Any = None
        self._started = False
        self._process = os.getpid()
        self._listener: Backend | None = None

    def warm_up(self) -> None:
        """Set up the profiler some steps before the recording, so that the setup does not slow down the first recorded
        step.

        Raises:
            UsageError: The path cannot be written, or a recording is already running.
            ToolError: PyTorch is not installed.
        """
        global _running
        check_path(self.path)
        if _running is not None:
            raise UsageError(f"cannot record {self.path}: {_running.path} is being recorded; end that recording first")
        if self.options.stacks and sys.version_info >= (3, 12):
            _import_compiler()
        profiler = _new_profiler(self.options)
        with _quiet_kineto(), warnings.catch_warnings():
            # PyTorch 2.11 warns before any cycle that it will forget the events of earlier ones
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            profiler.prepare_trace()
        _running, self._profiler, self._process = self, profiler, os.getpid()

    def cancel(self) -> None:
        """Discard a warm-up or a recording; nothing is written."""
        global _running
        if self._profiler is None:
            return
        if self._started:
            self._fall_silent()
        profiler, self._profiler, _running = self._profiler, None, None
        if os.getpid() != self._process:
            return
        if not self._started:
            profiler.start_trace()
        self._started = False
        profiler.stop_trace()

    def _fall_silent(self) -> None:
        """Stop emitting ranges, or return them to an enclosing memory profiler."""
        session.deactivate()
        listener, self._listener = self._listener, None
        if isinstance(listener, Watch) and listener.attached:
            session.activate(listener)
        watch_again()

    def __enter__(self) -> record:
        """Start recording. If nsys or ncu is attached, warn and record nothing."""
        if tool_attached():
            warnings.warn(
                f"nsys or ncu is attached and CUDA serves one profiler at a time: {self.path.name} is not recorded; "
                "read the report of nsys or ncu instead, or run without it",
                stacklevel=2,
            )
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
        if self._profiler is None:
            return
        self._fall_silent()
        self._started = False
        profiler, self._profiler, _running = self._profiler, None, None
        if os.getpid() != self._process:
            return
        if not _is_enabled():
            warnings.warn(
                f"{self.path.name} is not written: the program's own use of PyTorch's profiler ended the recording, as "
                "there can be one only; run without it",
                stacklevel=2,
            )
            return
        with waiting_signals():
            profiler.stop_trace()
            try:
                self.empty = _export(profiler, self.path)
            except OSError as failure:  # a failed write must not end the program
                warnings.warn(f"{self.path} is not written: {failure.strerror or failure}", stacklevel=2)
                return
            self.written = True


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the lines that Kineto logs for its own developers out of the terminal, unless the user asks for a level.

    Kineto reads the level when it is first used. No lower level leaves out the lines of STAGE and USDT; what stops a
    recording is said by `record`.
    """
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"
    try:
        yield
    finally:
        del os.environ[name]


def _import_compiler() -> None:
    """Import what annotations and optimizers import: with stacks, PyTorch 2.4 cannot end a recording in which it was.

    Seen with Python 3.12: "Python replay stack is empty", https://github.com/pytorch/pytorch/issues/101632.
    """
    with suppress(ImportError):  # also without torch, which is said later
        import torch._dynamo  # noqa: F401


def running() -> record | None:
    """The recording that is running or warmed up in this process."""
    return _running


def tool_attached() -> bool:
    """Whether this process runs under nsys or ncu, so that a CUDA profiler is already attached."""
    return session.tool_attached(os.environ) or "CUDA_INJECTION64_PATH" in os.environ


def part_of(path: Path, part: str) -> Path:
    """The trace path of a rank or a window: ``run.rank3.json.gz`` of ``run.json.gz``."""
    name, dot, suffix = path.name.partition(".json")
    return path.with_name(f"{name}.{part}{dot}{suffix}")


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


def _new_profiler(options: RecordOptions) -> Any:
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        raise ToolError(f"recording needs PyTorch, which cannot be imported ({error}); pip install torch") from None
    if _is_enabled():
        raise UsageError("PyTorch's profiler is already running, and only one can run at a time; stop it first")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        with_stack=options.stacks,
        record_shapes=options.shapes,
        profile_memory=options.memory,
        **_experimental(options),
        # without acc_events: it would make PyTorch read all events into Python at stop, which is not needed here and
        # fails if a stack has an undecodable name (UnicodeDecodeError in PyTorch 2.13)
    )


def _experimental(options: RecordOptions) -> dict[str, Any]:
    """Experimental options of newer PyTorch releases: all threads and, with stacks, Python garbage collections."""
    from torch._C._profiler import _ExperimentalConfig

    settings: dict[str, Any] = {"profile_all_threads": True} | (
        {"record_python_gc_info": True} if options.stacks else {}
    )
    while settings:
        try:
            return {"experimental_config": _ExperimentalConfig(**settings)}
        except TypeError:  # an older PyTorch lacks the last option
            settings.popitem()
    return {}


def _is_enabled() -> bool:
    """Whether PyTorch's profiler is running, on this thread or on all."""
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled)


_EVENT = re.compile(rb'"cat": "(?!Trace")')
"""An event of the program; PyTorch writes one of the recording itself into every trace."""


def _export(profiler: Any, path: Path) -> bool:
    """Write the trace to a temporary name and rename it, so that readers never see a partial file.

    Returns:
        Whether it has no event. Such a trace has a few kilobytes of names, and larger ones are not searched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.json")
    packed = partial.with_name(f"{partial.name}.gz")
    try:
        profiler.export_chrome_trace(str(partial))
        if not partial.exists() or not partial.stat().st_size:
            raise OSError("PyTorch could not write it; is the disk full?")
        empty = partial.stat().st_size < 1 << 16 and not _EVENT.search(partial.read_bytes())
        if path.name.endswith(".gz"):
            _compress(partial, packed)
            partial = packed
        partial.replace(path)
        return empty
    finally:
        for left in (partial, packed, path.with_name(f".{path.name}.{os.getpid()}.json")):
            left.unlink(missing_ok=True)
            left.with_name(f"{left.name}.tmp").unlink(missing_ok=True)  # PyTorch leaves this file after a failure


def _compress(trace: Path, packed: Path) -> None:
    """Compress a trace at the fastest level: a third larger than with the default level, in a tenth of the time."""
    with trace.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target, 1 << 20)
