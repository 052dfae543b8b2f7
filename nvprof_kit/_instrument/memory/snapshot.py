"""`memory_snapshot`: the history of PyTorch's CUDA caching allocator, labeled by layer, phase and step.

Read the file with ``nvprof-kit memory``, or open it at https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
from collections import deque
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any, Literal

from nvprof_kit._instrument.patches import Stack, nothing
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import replacing
from nvprof_kit._instrument.session import Watch
from nvprof_kit.errors import PATH, UsageError, require, require_choice
from nvprof_kit.names import LAYER_CATEGORIES, MEMORY_SPANS, PHASE_CATEGORIES, Category, kineto_name, memory_label

_LABELLING = (*LAYER_CATEGORIES, *PHASE_CATEGORIES)
_MAX_CHANGES = 100_000
"""Maximum number of kept begins and ends of steps and phases."""

_running: memory_snapshot | None = None
_observed = False


class Labels:
    """Labels allocations with the innermost layer or phase, and the step.

    PyTorch keeps one label per thread. A thread outside all layers and phases, such as autograd's before its first
    layer, has no label; the reader then uses `changes` to find what the other threads were doing at that time.

    Args:
        set_label: Sets the label of later allocations of the calling thread.
        step_ended: Called with the step number when a step ends.

    Attributes:
        changes: ``(µs since 1970, label from then on)`` for each begin and end of a step or phase.
    """

    def __init__(self, set_label: Any, step_ended: Any) -> None:
        self.changes: deque[tuple[int, str]] = deque(maxlen=_MAX_CHANGES)
        self.set = set_label
        self._step_ended = step_ended
        self._step: int | None = None
        self._step_thread = 0
        self._names = Stack()

    def entered(self, range_: Range) -> None:
        """Label with this range, if it is a layer or a phase."""
        if range_.category is Category.STEP:
            self._step, self._step_thread = range_.payload, threading.get_ident()
        elif range_.category in _LABELLING:
            self._names.items.append(kineto_name(range_.text, range_.category))
        self._label(range_)

    def left(self, range_: Range) -> None:
        """Label with the enclosing range."""
        if range_.category is Category.STEP:
            self._step = None
            self._step_ended(range_.payload)
        elif range_.category in _LABELLING and self._names.items:
            self._names.items.pop()
        self._label(range_)

    def _label(self, range_: Range) -> None:
        if range_.category is not Category.STEP and range_.category not in _LABELLING:
            return
        names, label = self._names.items, ""
        if names or (self._step is not None and threading.get_ident() == self._step_thread):
            label = memory_label(names[-1] if names else "", self._step)
        self.set(label)
        if range_.category not in LAYER_CATEGORIES:
            self.changes.append((time.time_ns() // 1000, label))


class memory_snapshot(ContextDecorator):
    """Record the history of the CUDA caching allocator; a context manager and a decorator.

    The snapshot (that of ``torch.cuda.memory._dump_snapshot``) is written when the block ends, also after an exception,
    or when `at_step` ends; on an out-of-memory error, also as ``NAME_oom.pickle``. Without CUDA, or with
    ``cudaMallocAsync``, it warns and does nothing. Layers are those of `annotate_model` and `layer_range`, steps those
    of `step`.

    Args:
        path: File to write, usually ``.pickle``; an existing file is replaced.
        at_step: Write the snapshot when the step with this number ends, and stop recording. None writes at the end of
            the block.
        max_entries: Maximum number of allocator events to keep; older ones are dropped.
        stacks: ``python`` for Python call stacks; ``all`` adds C++ frames, which is slower and several times larger.

    Attributes:
        written: The files written so far.

    Raises:
        UsageError: On entry: another snapshot is being recorded, or the path cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        at_step: int | None = None,
        max_entries: int = 1_000_000,
        stacks: Literal["python", "all"] = "python",
    ) -> None:
        self.path = Path(require(path, PATH, "memory_snapshot: path", "a path")).absolute()
        require(at_step, (int, type(None)), "memory_snapshot: at_step", "the number of a step")
        require(max_entries, int, "memory_snapshot: max_entries", "a number of events")
        require_choice(stacks, ("python", "all"), "memory_snapshot: stacks")
        self._at_step, self._max_entries, self._stacks = at_step, max_entries, stacks
        self.written: list[Path] = []
        self._watch: Watch | None = None
        self._labels: Labels | None = None
        self._memory: Any = None
        self._process = 0

    def __enter__(self) -> memory_snapshot:
        """Start recording."""
        global _running, _observed  # noqa: PLW0603
        if _running is not None and is_recording():
            raise UsageError(f"{self.path}: {_running.path} is being recorded; end that snapshot first")
        if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise UsageError(f"{self.path}: cannot be written; name a file in a folder that can")
        import torch

        reason = ""
        if not torch.cuda.is_available():
            reason = "no CUDA here"
        elif torch.cuda.get_allocator_backend() != "native":
            reason = "only PyTorch's own allocator keeps a history, not cudaMallocAsync"
        if reason:
            warnings.warn(f"{self.path.name} is not recorded: {reason}", stacklevel=2)
            return self
        torch.cuda.init()
        self._memory = torch.cuda.memory
        self._process = os.getpid()
        if not _observed:  # PyTorch cannot unregister an observer
            torch._C._cuda_attach_out_of_memory_observer(_out_of_memory)
            _observed = True
        set_label = getattr(self._memory, "_set_memory_metadata", nothing)  # before PyTorch 2.9: no labels
        self._labels = Labels(set_label, self._step_ended)
        self._watch = Watch(self._labels)
        self._memory._record_memory_history(
            enabled="all", context="all", stacks=self._stacks, max_entries=self._max_entries
        )
        _running = self
        try:
            self._watch.attach()
        except BaseException:
            self._watch = _running = None
            self._memory._record_memory_history(enabled=None)
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        """Write the snapshot, if not yet written, and stop."""
        global _running  # noqa: PLW0603
        watch, self._watch = self._watch, None
        if watch is None:
            return
        _running = None
        watch.detach()
        if self._process != os.getpid():  # the process has forked: the history belongs to the parent
            return
        try:
            self._write(self.path)
        except OSError as error:  # a failed write must not end the program
            warnings.warn(f"{self.path} is not written: {error.strerror}", stacklevel=3)
        finally:
            self._memory._record_memory_history(enabled=None)
            if self._labels is not None:
                self._labels.set("")

    def _step_ended(self, number: int) -> None:
        if self._at_step is not None and number == self._at_step:
            self.__exit__()

    def _write(self, path: Path) -> None:
        with replacing(path) as partial, partial.open("wb") as file:
            changes = [] if self._labels is None else list(self._labels.changes)
            pickle.dump({**self._memory._snapshot(), MEMORY_SPANS: changes}, file)
        self.written.append(path)


def is_recording() -> bool:
    """Whether this process records a snapshot."""
    return _running is not None and _running._process == os.getpid()


def _out_of_memory(*_sizes: object) -> None:
    if _running is not None and is_recording():
        try:
            _running._write(_running.path.with_name(f"{_running.path.stem}_oom{_running.path.suffix}"))
        except Exception as error:  # the program must see its own error, not this one
            warnings.warn(f"out of memory, and the snapshot of it could not be written: {error}", stacklevel=2)
