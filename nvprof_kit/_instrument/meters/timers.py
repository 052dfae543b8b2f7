"""`global_timer`: how long the named stages of a training loop take on the CPU and the GPU, per rank.

GPU time is measured with CUDA events, which are read later, when they have completed, so a stage does not synchronize
with the GPU. Each completed stage is written to the rank's log immediately, so a killed rank leaves its log.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from nvprof_kit._instrument import session
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import claim_file, rank
from nvprof_kit.errors import require
from nvprof_kit.names import Category


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a stage, until it is written to the log: its times, and its CUDA events or None."""

    range: Range
    start_s: float = 0.0
    began_ns: int = 0
    ended_ns: int = 0
    start_event: Any = None
    end_event: Any = None


class GlobalTimer:
    """Time named stages of a program. Each stage is also emitted as a phase range.

    CPU time is in seconds; GPU time is between two CUDA events on the current stream, in milliseconds
    (``torch.cuda.Event.elapsed_time``). Data loader workers, and processes forked after the log is opened, time
    nothing.

    Args:
        folder: Folder of the log. Rank 0 writes ``timer_rank0.log`` when its first stage ends, and replaces a log of an
            earlier run.

    Attributes:
        enabled: Whether stages are timed; initially False with ``NVPROF_KIT=off``.
        folder: Folder of the log; change it before the first stage.
    """

    def __init__(self, folder: str | Path = "time_log") -> None:
        self.enabled = session.mode != "off"
        self.folder = Path(folder)
        self._open = threading.local()  # the running stages of a thread by name, the latest last
        self._ranges: dict[str, Range] = {}
        self._waiting: deque[_Call] = deque()
        self._file: TextIO | None = None
        self._owner = 0
        self._rank = 0
        self._lock = threading.RLock()

    def start(self, name: str) -> None:
        """Start a stage on this thread. Stages can be nested, also in themselves."""
        if not self.enabled or self._is_not_ours():
            return
        range_ = self._ranges.get(name)
        if range_ is None:
            require(name, str, "global_timer: the name of a stage", "a text")
            range_ = self._ranges[name] = Range(name.replace("\n", " "), Category.PHASE)
        call = _Call(range_)
        vars(self._open).setdefault(name, []).append(call)
        if session.backend is not None:
            session.backend.open(range_, call)
        call.start_event = mark_gpu()
        call.start_s = time.time()
        call.began_ns = time.perf_counter_ns()

    def stop(self, name: str) -> None:
        """Stop the last started stage of this name on this thread; warns if there is none."""
        if not self.enabled or self._is_not_ours():
            return
        ended_ns = time.perf_counter_ns()
        calls = vars(self._open).get(name)
        if not calls:
            warnings.warn(f"stage {name!r} is stopped and was not started on this thread", stacklevel=2)
            return
        call = calls.pop()
        call.ended_ns = ended_ns
        if call.start_event is not None:
            call.end_event = mark_gpu()
        if session.backend is not None:
            session.backend.close(call)
        with self._lock:
            self._waiting.append(call)
            waiting = self._waiting if self.enabled else ()  # else it has been closed meanwhile
            while waiting and (waiting[0].end_event is None or (not _capturing() and waiting[0].end_event.query())):
                self._write(self._waiting.popleft())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block or each call of a function: ``with global_timer.stage("forward"):`` or as a decorator."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def dump(self) -> Path:
        """Wait for the GPU to complete the timed stages and write them; returns the path of the log.

        This is called automatically at exit. Timing may continue afterwards.
        """
        if self._is_not_ours():
            return self._path()
        with self._lock:
            while self._waiting:
                call = self._waiting.popleft()
                if call.end_event is not None:
                    call.end_event.synchronize()
                self._write(call)
        return self._path()

    def _is_not_ours(self) -> bool:
        """Whether this process is a fork of the one that writes the log, or its data loader worker."""
        if self._owner not in (0, os.getpid()):
            return True
        workers = sys.modules.get("torch.utils.data")
        return workers is not None and self._owner == 0 and workers.get_worker_info() is not None

    def _write(self, call: _Call) -> None:
        cpu_ns, gpu_ms = call.ended_ns - call.began_ns, float("nan")
        if call.end_event is not None:
            with suppress(RuntimeError, ValueError):  # its events are on two devices
                gpu_ms = call.start_event.elapsed_time(call.end_event)
        end_s = call.start_s + cpu_ns / 1e9
        try:
            if self._file is None:
                self._rank, self._owner = rank(), os.getpid()
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = claim_file(self._path())
                atexit.register(self._close)
            self._file.write(
                f"[RANK {self._rank}] {call.range.text}, start={call.start_s:.6f}, end={end_s:.6f}, "
                f"cpu_dur={cpu_ns / 1e9:.6f}s, cuda_dur={gpu_ms:.3f}ms\n"
            )
            self._file.flush()
        except OSError as error:  # a log that cannot be written must not end the training
            warnings.warn(f"{self._path()}: cannot write it ({error.strerror}); nothing more is timed", stacklevel=2)
            self.enabled = False
            self._waiting.clear()
            self._close_log()

    def _close(self) -> None:
        """Write the remaining stages and stop timing, at exit."""
        if not self._is_not_ours():
            self.dump()
            with self._lock:
                self.enabled = False
                self._close_log()

    def _close_log(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk takes no last buffer either
                self._file.close()

    def _path(self) -> Path:
        """The path of the log, whether open or not."""
        if self._file is not None and self.enabled:
            return Path(self._file.name)
        return self.folder / f"timer_rank{rank()}.log"


def _capturing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def mark_gpu() -> Any:
    """Record an event on the current stream; None without CUDA or during CUDA graph capture."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or _capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


global_timer = GlobalTimer()
"""The timer of this process, for training scripts to import."""
