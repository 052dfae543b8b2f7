"""Counts operators by the layer, phase and thread of the open ranges.

A dispatch mode sees every operator, also in the backward pass: autograd runs its nodes under the modes of the thread
that started the pass, on any thread. The open ranges give the layer and phase, as in a capture. The mode returns the
results unchanged and keeps no reference to them.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvprof_kit._instrument.flops.operators import Kind, kind_here, kind_of, work_of
from nvprof_kit._instrument.flops.traffic import Cache, Run, add_traffic, causal_share, l2_bytes, named_arguments
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES, Category, parse_range

OUT_OF_REACH = "(out of the counter's reach)"
"""Name of unknown work in a range that opens where the counter cannot see operators: on a thread that the program
started, or inside an operator."""


class Region:
    """A layer or phase in the tree of ranges, with the operators that ran directly in it.

    Attributes:
        layer: Path of the layer, or `NO_LAYER`.
        phase: Phase of the layer; outside layers, the text of the phase range or `NO_PHASE`.
        outer: The enclosing region; None at the top.
        calls: Number of times its range was opened.
        work: The runs of operators of known work, and their memory traffic.
        unknown: Runs of operators without a known FLOP count.
        inside: The nested regions by layer and phase.
    """

    __slots__ = ("calls", "inside", "layer", "outer", "phase", "unknown", "work")

    def __init__(self, layer: str, phase: str, outer: Region | None = None) -> None:
        self.layer = layer
        self.phase = phase
        self.outer = outer
        self.calls = 0
        self.work: list[Run] = []
        self.unknown: dict[str, int] = {}
        self.inside: dict[tuple[str, str], Region] = {}


class _Open(NamedTuple):
    """An open range: the thread's innermost layer, and the innermost phase outside layers."""

    layer: Region | None
    phase: Region | None


_NOWHERE = _Open(None, None)


class FlopCounter:
    """A tree of regions with operator counts; follows the ranges as the listener of a `Watch`.

    Attributes:
        steps: Number of completed steps.
        l2_bytes: Size of the L2 that the memory traffic was counted for.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.l2_bytes = l2_bytes()
        self._cache = Cache(2 * self.l2_bytes)
        self._top: dict[tuple[str, str], Region] = {}
        self._threads: dict[int, list[_Open]] = {}
        self._lock = threading.RLock()

    def entered(self, range_: Range) -> None:
        """A range has opened on the calling thread."""
        with self._lock:
            stack = self._threads.setdefault(threading.get_ident(), [])
            at = stack[-1] if stack else _NOWHERE
            stack.append(self._into(at, range_))

    def left(self, range_: Range) -> None:
        """A range has closed on the calling thread."""
        with self._lock:
            thread = threading.get_ident()
            stack = self._threads.get(thread)
            if stack:
                stack.pop()
            if not stack:
                self._threads.pop(thread, None)
            if range_.category is Category.STEP:
                self.steps += 1

    def add_unknown(self, operator: str) -> None:
        """Note an operator of unknown work that ran on the calling thread."""
        with self._lock:
            region = self._here()
            region.unknown[operator] = region.unknown.get(operator, 0) + 1

    def add(self, operator: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count an operator that ran on the calling thread, and its memory traffic."""
        name, dtype, flops = work_of(operator, args, kwargs, out) if kind is not Kind.NOTHING else ("", "", 0)
        if flops is None:
            self.add_unknown(name)
            return
        run = Run(name, dtype, flops, flops)
        is_overload = isinstance(operator, torch._ops.OpOverload)
        arguments = named_arguments(operator, args, kwargs) if is_overload else {}
        with self._lock:
            if is_overload:
                run.operator = operator._schema.name
                run.least_flops = int(flops * causal_share(run.operator, arguments))
                add_traffic(run, self._cache, operator._schema, arguments, out)
            if run.flops or run.bytes:
                self._here().work.append(run)

    def regions(self) -> list[Region]:
        """All regions, parents before children; no operator may be counted any more."""
        with self._lock:
            self._cache.end()
            regions = list(self._top.values())
            for region in regions:  # the list grows during the loop
                regions += region.inside.values()
            return regions

    def _into(self, at: _Open, range_: Range) -> _Open:
        if range_.category in LAYER_CATEGORIES:
            path = parse_range(range_.text, range_.category.value).text
            inside = self._top if at.layer is None else at.layer.inside
            region = _region(inside, path, range_.category.value, at.layer)
            region.calls += 1
            if not torch._C._len_torch_dispatch_stack():
                region.unknown[OUT_OF_REACH] = region.unknown.get(OUT_OF_REACH, 0) + 1
            return _Open(region, at.phase)
        if range_.category in PHASE_CATEGORIES:
            region = _region(self._top, NO_LAYER, range_.text)
            region.calls += 1
            return _Open(at.layer, region)
        return at

    def _here(self) -> Region:
        """The thread's innermost layer, else its phase, else the phase of the only other thread that has one."""
        stack = self._threads.get(threading.get_ident())
        at = stack[-1] if stack else _NOWHERE
        if at.layer is not None:
            return at.layer
        if at.phase is not None:
            return at.phase
        elsewhere = [open_[-1].phase for open_ in self._threads.values() if open_ and open_[-1].phase is not None]
        return elsewhere[0] if len(elsewhere) == 1 else _region(self._top, NO_LAYER, NO_PHASE)


def _region(regions: dict[tuple[str, str], Region], layer: str, phase: str, outer: Region | None = None) -> Region:
    region = regions.get((layer, phase))
    if region is None:
        region = regions[layer, phase] = Region(layer, phase, outer)
    return region


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Counts every operator on the threads where the mode is active, and returns its result unchanged."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self._counter = counter
        self._kinds: dict[Any, Kind] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__") for kind in types):
            return (
                NotImplemented  # a wrapper subclass dispatches again, with its inner tensors (a DTensor's local shard)
            )
        if FakeTensor in types:
            return func(*args, **kwargs)  # a call for a shape computes nothing
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        if kind is Kind.INSIDE:
            kind = kind_here(func, args)
        if kind is Kind.INSIDE:
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        out = func(*args, **kwargs)
        if kind is not Kind.OTHER:
            try:
                self._counter.add(func, kind, args, kwargs, out)
            except Exception:  # a form of the operator that is not foreseen must not end the program
                self._counter.add_unknown(str(func))
        return out


def counting(counter: FlopCounter) -> ExitStack:
    """Start counting on this thread and in its backward passes; close the returned stack to stop.

    Meanwhile, compiled functions run eagerly, so that the mode sees their operators.
    """
    with ExitStack() as stack:
        set_stance = getattr(torch.compiler, "set_stance", None)
        if set_stance is not None:  # PyTorch 2.6 or later
            stack.enter_context(set_stance("force_eager"))
        stack.enter_context(_seen_triton(counter))
        stack.enter_context(_Mode(counter))
        return stack.pop_all()


def _seen_triton(counter: FlopCounter) -> ExitStack:
    """Count each launch of a Triton kernel as unknown; launches bypass PyTorch's dispatcher."""
    jit = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    undo = ExitStack()
    if jit is None:
        return undo
    run = jit.run

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            counter.add_unknown(f"triton::{getattr(kernel, '__name__', 'kernel')}")
        return run(kernel, *args, **kwargs)

    jit.run = noted
    undo.callback(setattr, jit, "run", run)
    return undo
