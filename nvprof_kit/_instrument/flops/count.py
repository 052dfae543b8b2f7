"""`count_flops`: count the floating point operations of a step by layer and phase.

Read the file with ``nvprof-kit flops``. Counted are the operators that PyTorch's ``FlopCounterMode`` counts: matrix
products, convolutions and attention. Other operators that could do floating point work are listed as unknown.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from contextlib import ContextDecorator, ExitStack
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._instrument import session
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.ranks import rank, replacing, world_size
from nvprof_kit._instrument.session import Watch
from nvprof_kit.errors import PATH, ToolError, UsageError, require
from nvprof_kit.issues import Issue
from nvprof_kit.names import COUNTING, FLOPS_FORMAT, FLOPS_VERSION, Category

if TYPE_CHECKING:
    from nvprof_kit._instrument.flops.counter import FlopCounter

AMOUNTS = ("flops", "least_flops", "bytes", "dram_bytes")
"""What is counted of an operator."""

COUNT_VARIABLE = "NVPROF_KIT_COUNT"
"""Environment variable with the file to count the program's second step into, without a change of the program."""

_running: count_flops | None = None


class count_flops(ContextDecorator):
    """Count the floating point operations of part of the program; a context manager and a decorator.

    ```python
    with nvprof_kit.count_flops("run.flops.json"):  # around one step, before the captured steps
        train(batch)
    ```

    Layers and phases (forward, backward, recompute) are those of the ranges of `annotate_model` and `layer_range`. The
    formulas are those of ``torch.utils.flop_counter``; a multiply-add counts as two operations. Results do not change
    and no tensor is kept alive, but each operator is dispatched through Python, so count a step whose duration does not
    matter. Code compiled by torch.compile runs uncompiled while counting; before PyTorch 2.6 it runs compiled, and its
    operators count as those of the outermost compiled module. The replay of a CUDA graph runs no operators, so it
    counts as nothing. Operators on threads that the program started are listed as unknown. After an exception,
    nothing is written. With ``NVPROF_KIT=off`` it does nothing.

    Args:
        path: File to write, usually ``NAME.flops.json`` next to the capture ``NAME.sqlite``; an existing file is
            replaced. In a multi-rank program each rank writes its own file, ``NAME.rank3.flops.json``.
        at_step: Count only the step with this number (`nvprof_kit.step`); the file is written when that step ends.

    Attributes:
        path: The absolute path.
        written: The file, or None before it is written.

    Raises:
        UsageError: On entry: the file cannot be written, or another count is running.
        ToolError: On entry: PyTorch is not installed, or older than 2.4.
    """

    def __init__(self, path: str | Path = "run.flops.json", *, at_step: int | None = None) -> None:
        self.path = Path(require(path, PATH, "count_flops: path", "a path")).absolute()
        require(at_step, (int, type(None)), "count_flops: at_step", "the number of a step")
        self.written: Path | None = None
        self._at_step = at_step
        self._awaits_second = False  # counts the program's second step, whatever its number
        self._steps_begun = 0
        self._step: Range | None = None
        self._watch: Watch | None = None
        self._counter: FlopCounter | None = None
        self._counting = ExitStack()
        self._handled: BaseException | None = None
        self._process = 0

    def __enter__(self) -> count_flops:
        """Start counting, or wait for the step."""
        global _running  # noqa: PLW0603
        if session.mode == "off":
            return self
        if awaits_second_step() and _running is not None:
            _running._finish(write=False)  # the program counts itself
        if _running is not None and _running._process == os.getpid():
            raise UsageError(f"{self.path}: already counting into {_running.path}; end that count first")
        if self.path.suffix != ".json":
            raise UsageError(f"{self.path}: counts are json; name the file NAME.flops.json for the capture NAME.sqlite")
        if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise UsageError(f"{self.path}: cannot be written; name a file in a folder that can")
        try:
            from nvprof_kit._instrument.flops import counter as flop_counter  # noqa: F401
        except ImportError as error:
            raise ToolError.of("no-flop-counter", error=error) from None
        self.written = None
        self._handled = sys.exc_info()[1]
        self._process = os.getpid()
        self._watch = Watch(self)
        _running = self
        try:
            self._watch.attach()
            if self._at_step is None and not self._awaits_second:
                self._begin()
        except BaseException:
            self._finish(write=False)
            raise
        return self

    def __exit__(self, kind: object, *_exception: object) -> None:
        """Stop and, unless by an exception, write the file."""
        if self._at_step is not None and self._watch is not None and kind is None:
            warnings.warn(f"no step {self._at_step} was run: {self.path.name} is not written", stacklevel=2)
        self._finish(write=kind is None and self._at_step is None)

    def entered(self, range_: Range) -> None:
        """Listener of a `Watch`: a range has opened."""
        if range_.category is Category.STEP and self._counter is None:
            self._steps_begun += 1
            if self._steps_begun == 2 if self._awaits_second else range_.payload == self._at_step is not None:
                self._step = range_
                self._begin()
        if self._counter is not None:
            self._counter.entered(range_)

    def left(self, range_: Range) -> None:
        """Listener of a `Watch`: a range has closed."""
        if self._counter is not None:
            self._counter.left(range_)
        if self._step is range_ and self._counter is not None:
            self._finish(write=sys.exc_info()[1] is self._handled)

    def _begin(self) -> None:
        from nvprof_kit._instrument.flops.counter import FlopCounter, counting

        self._counter = FlopCounter()
        self._counting = counting(self._counter)
        if self._watch is not None:
            self._counting.callback(self._watch.end, self._watch.start(Range(COUNTING, Category.USER)))

    def _finish(self, *, write: bool) -> None:
        global _running  # noqa: PLW0603
        watch, self._watch = self._watch, None
        counter, self._counter = self._counter, None
        if watch is None:
            return
        _running = None
        self._counting.close()
        watch.detach()
        if write and counter is not None and self._process == os.getpid():  # else the process has forked since
            try:
                self.written = _write(counter, self.path)
            except OSError as error:  # a failed write must not end the training
                warnings.warn(f"{self.path}: cannot write it ({error.strerror}); count again", stacklevel=3)


def count_second_step() -> None:
    """Count the program's second step into the file that `COUNT_VARIABLE` names; in the first the optimizer makes its
    state.
    """
    counting = count_flops(os.environ[COUNT_VARIABLE])
    counting._awaits_second = True
    counting.__enter__()


def awaits_second_step() -> bool:
    """Whether `count_second_step` was called and the program has not run its second step since."""
    return _running is not None and _running._awaits_second


def watch_again() -> None:
    """Listen for the step to count on top of the present backend, which has replaced the one at the count's entry."""
    if _running is not None and _running._watch is not None and _running._counter is None:
        _running._watch.attached = False
        _running._watch = Watch(_running)
        _running._watch.attach()


def _write(counter: FlopCounter, path: Path) -> Path:
    """Write the counts into the rank's file."""
    if world_size() > 1:  # run.flops.json becomes run.rank3.flops.json
        tail = ".flops.json" if path.name.endswith(".flops.json") else ".json"
        path = path.with_name(f"{path.name.removesuffix(tail)}.rank{rank()}{tail}")
    counted_work = document(counter)
    if not counted_work["operators"] and not counted_work["unknown"]:
        warnings.warn(Issue.of("nothing-counted:operators", name=path.name), stacklevel=4)
    with replacing(path) as partial:
        partial.write_text(json.dumps(counted_work, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def document(counter: FlopCounter) -> dict[str, Any]:
    """The counts in the format of the file: see docs/flops.md."""
    import torch

    number = {region: index for index, region in enumerate(counter.regions())}
    ranges: list[dict[str, Any]] = []
    operators: list[dict[str, Any]] = []
    unknown: list[dict[str, Any]] = []
    for region, index in number.items():
        inside = None if region.outer is None else number[region.outer]
        called = {"layer": region.layer, "phase": region.phase, "inside": inside, "calls": region.calls}
        ranges.append({**called, "fused_bytes": region.fused_bytes})
        for (name, dtype, *amounts), runs in Counter(map(astuple, region.work)).items():  # of the same work and traffic
            sums = {amount: runs * each for amount, each in zip(AMOUNTS, amounts, strict=True)}
            operators.append({"range": index, "name": name, "dtype": dtype, "runs": runs, **sums})
        unknown += [{"range": index, "name": name, "runs": runs} for name, runs in region.unknown.items()]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    about = {"format": FLOPS_FORMAT, "version": FLOPS_VERSION, "torch": torch.__version__, "gpu": gpu, "rank": rank()}
    about |= {"steps": counter.steps, "l2_bytes": counter.l2_bytes}
    return {**about, "ranges": ranges, "operators": operators, "unknown": unknown}
