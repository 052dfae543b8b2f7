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

from nvprof_kit._instrument.flops.operators import Kind, kind_here, kind_of, name_of, work_of
from nvprof_kit._instrument.flops.regions import Call, Fused, Region
from nvprof_kit._instrument.flops.traffic import Cache, Run, accesses_of, computed_share, l2_bytes, named_arguments
from nvprof_kit._instrument.patches import Patch, before
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES, Category, parse_range

OUT_OF_REACH = "(out of the counter's reach)"
"""Name of unknown work in a range that opens where the counter cannot see operators: on a thread that the program
started, or inside an operator."""


_MAKES_STATES = frozenset({"aten::zeros", "aten::zeros_like", "aten::full", "aten::full_like", "aten::new_zeros"})
"""Operators by which an optimizer's first step makes its states, which later steps only change."""


class _Open(NamedTuple):
    """An open range: the thread's innermost call of a layer, and the innermost of a phase outside layers."""

    layer: Call | None
    phase: Call | None


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
        self._cache = Cache(self.l2_bytes)
        self._fused = Fused()
        self._outside = Call(Region(NO_LAYER, NO_PHASE))
        self._top: dict[tuple[str, str], Region] = {}
        self._threads: dict[int, list[_Open]] = {}
        self._lock = threading.RLock()

    def entered(self, range_: Range) -> None:
        """A range has opened on the calling thread."""
        with self._lock:
            stack = self._threads.setdefault(threading.get_ident(), [_NOWHERE])
            at = stack[-1]
            if range_.category in LAYER_CATEGORIES:
                path = parse_range(range_.text, range_.category.value).text
                outer = None if at.layer is None else at.layer.region
                region = _region(self._top if outer is None else outer.inside, path, range_.category.value, outer)
                if not torch._C._len_torch_dispatch_stack():
                    region.unknown[OUT_OF_REACH] += 1
                at = _Open(Call(region, at.layer), at.phase)
            elif range_.category in PHASE_CATEGORIES:
                at = _Open(at.layer, Call(_region(self._top, NO_LAYER, range_.text)))
            stack.append(at)

    def left(self, range_: Range) -> None:
        """A range has closed on the calling thread."""
        with self._lock:
            thread = threading.get_ident()
            if len(self._threads.get(thread, ())) > 2:
                self._threads[thread].pop()
            else:
                self._threads.pop(thread, None)
            if range_.category is Category.STEP:
                self.steps += 1

    def add_unknown(self, operator: str) -> None:
        """Note an operator of unknown work that ran on the calling thread."""
        with self._lock:
            self._here().region.unknown[operator] += 1

    def add(self, operator: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count an operator that ran on the calling thread, and its memory traffic."""
        dtype, flops = work_of(operator, args, kwargs, out) if kind != "moves" else ("", 0)
        name = name_of(operator)
        if flops is None:
            self.add_unknown(name)
            return
        run = Run(name, dtype, flops, flops)
        is_overload = isinstance(operator, torch._ops.OpOverload)
        arguments = named_arguments(operator, args, kwargs) if is_overload else {}
        with self._lock:
            call = self._here()
            if is_overload:
                run.least_flops = int(flops * computed_share(name, arguments))
                accesses = accesses_of(operator._schema, arguments, out)
                if name not in _MAKES_STATES or call.region.phase != Category.OPTIMIZER.value:
                    self._cache.add(run, accesses)
                    self._fused.add(call, accesses)
            if run.flops or run.bytes:
                call.region.work.append(run)

    def regions(self) -> list[Region]:
        """All regions, parents before children; no operator may be counted any more."""
        with self._lock:
            self._cache.end()
            outside = self._outside.region
            regions = [*self._top.values(), *([outside] if outside.work or outside.unknown else ())]
            for region in regions:  # the list grows during the loop
                regions += region.inside.values()
            return regions

    def _here(self) -> Call:
        """The thread's innermost layer, else its phase, else the phase of the only other thread that has one."""
        at = self._threads.get(threading.get_ident(), [_NOWHERE])[-1]
        phases = [stack[-1].phase for stack in self._threads.values() if stack[-1].phase is not None]
        only_phase = phases[0] if len(phases) == 1 else None
        return at.layer or at.phase or only_phase or self._outside


def _region(regions: dict[tuple[str, str], Region], layer: str, phase: str, outer: Region | None = None) -> Region:
    """The region, called once more."""
    region = regions.setdefault((layer, phase), Region(layer, phase, outer))
    region.calls += 1
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
        if kind == "composite":
            kind = kind_here(func, args)
        if kind == "composite":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        out = func(*args, **kwargs)
        if kind:
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
        jit = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
        if jit is not None:  # launches of Triton kernels bypass PyTorch's dispatcher

            def note(kernel: Any, /, *_args: Any, warmup: bool = False, **_kwargs: Any) -> None:
                if not warmup:
                    counter.add_unknown(f"triton::{getattr(kernel, '__name__', 'kernel')}")

            stack.callback(Patch(jit, "run", before(note)).remove)
        stack.enter_context(_Mode(counter))
        return stack.pop_all()
