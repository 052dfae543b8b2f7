"""Counts operators where they run: by the layer, phase and thread that the open ranges say.

A dispatch mode sees every operator that reaches a kernel, in the backward pass too: autograd runs its nodes under the
modes of the thread that asked for the pass, on whichever thread. Where that is, the ranges tell, as they will in the
capture. The results of the operators are handed on untouched, and nothing of them is kept.
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
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES, Category, parse_range

OUT_OF_REACH = "(out of the counter's reach)"
"""Name of the unknown work of a range that opens where the counter sees nothing: on a thread of the program's own, or
inside an operator."""


class Place:
    """A range that was open, inside those around it: what ran directly in it.

    Attributes:
        layer: The layer's path, or `NO_LAYER`.
        phase: Its phase; outside layers the phase range's text or `NO_PHASE`.
        around: The place around it, None at the top.
        calls: How often it was opened.
        work: Runs and floating point operations by operator and type of number.
        unknown: Runs of operators whose work is not known.
        inside: The places inside it, by layer and phase.
    """

    __slots__ = ("around", "calls", "inside", "layer", "phase", "unknown", "work")

    def __init__(self, layer: str, phase: str, around: Place | None = None) -> None:
        self.layer = layer
        self.phase = phase
        self.around = around
        self.calls = 0
        self.work: dict[tuple[str, str], list[int]] = {}
        self.unknown: dict[str, int] = {}
        self.inside: dict[tuple[str, str], Place] = {}


class _Open(NamedTuple):
    """What an open range makes of its thread's position: the innermost layer, and the innermost phase outside."""

    layer: Place | None
    phase: Place | None


_NOWHERE = _Open(None, None)


class FlopCounter:
    """A tree of places, and what ran in each; as the listener of a `Watch` it follows the ranges.

    Attributes:
        steps: Number of steps' ranges that ended.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._top: dict[tuple[str, str], Place] = {}
        self._threads: dict[int, list[_Open]] = {}
        self._lock = threading.RLock()

    def entered(self, range_: Range) -> None:
        """A range has opened on the calling thread."""
        with self._lock:
            stack = self._threads.setdefault(threading.get_ident(), [])
            at = stack[-1] if stack else _NOWHERE
            stack.append(self._into(at, range_))

    def left(self, range_: Range) -> None:
        """It has closed."""
        with self._lock:
            thread = threading.get_ident()
            stack = self._threads.get(thread)
            if stack:
                stack.pop()
            if not stack:
                self._threads.pop(thread, None)
            if range_.category is Category.STEP:
                self.steps += 1

    def add(self, operator: str, dtype: str, flops: int | None) -> None:
        """An operator has run on the calling thread; None: its work is not known."""
        with self._lock:
            place = self._here()
            if flops is None:
                place.unknown[operator] = place.unknown.get(operator, 0) + 1
            elif flops:
                runs = place.work.setdefault((operator, dtype), [0, 0])
                runs[0] += 1
                runs[1] += flops

    def places(self) -> list[Place]:
        """Every place, those around others first."""
        with self._lock:
            found = list(self._top.values())
            for place in found:  # which grows
                found += place.inside.values()
            return found

    def _into(self, at: _Open, range_: Range) -> _Open:
        if range_.category in LAYER_CATEGORIES:
            path = parse_range(range_.text, range_.category.value).text
            inside = self._top if at.layer is None else at.layer.inside
            place = _found(inside, path, range_.category.value, at.layer)
            place.calls += 1
            if not torch._C._len_torch_dispatch_stack():
                place.unknown[OUT_OF_REACH] = place.unknown.get(OUT_OF_REACH, 0) + 1
            return _Open(place, at.phase)
        if range_.category in PHASE_CATEGORIES:
            place = _found(self._top, NO_LAYER, range_.text)
            place.calls += 1
            return _Open(at.layer, place)
        return at

    def _here(self) -> Place:
        """The calling thread's innermost layer; else its phase; else that of the one other thread that has one."""
        stack = self._threads.get(threading.get_ident())
        at = stack[-1] if stack else _NOWHERE
        if at.layer is not None:
            return at.layer
        if at.phase is not None:
            return at.phase
        elsewhere = [open_[-1].phase for open_ in self._threads.values() if open_ and open_[-1].phase is not None]
        return elsewhere[0] if len(elsewhere) == 1 else _found(self._top, NO_LAYER, NO_PHASE)


def _found(places: dict[tuple[str, str], Place], layer: str, phase: str, around: Place | None = None) -> Place:
    place = places.get((layer, phase))
    if place is None:
        place = places[layer, phase] = Place(layer, phase, around)
    return place


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator on the threads where it is in force, and hands on what each returns."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()
        self._counter = counter
        self._kinds: dict[Any, Kind] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(_wraps, types)):
            return NotImplemented  # what it wraps comes here next: a DTensor's shard, not its whole
        if FakeTensor in types:
            return func(*args, **kwargs)  # asked for a shape, it computes nothing
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        if kind is Kind.INSIDE:
            kind = kind_here(func, args)
        if kind is Kind.INSIDE:
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        out = func(*args, **kwargs)
        if kind is not Kind.NOTHING:
            self._counter.add(*work_of(func, args, kwargs, out))
        return out


def _wraps(kind: type) -> bool:
    """Whether tensors of a class hold others, and do their work by those."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def counting(counter: FlopCounter) -> ExitStack:
    """Begin to count on this thread and those of its backward passes; closing what is returned ends it.

    Meanwhile what torch.compile has compiled runs as it was written, so that its operators are seen.
    """
    with ExitStack() as stack:
        set_stance = getattr(torch.compiler, "set_stance", None)
        if set_stance is not None:  # PyTorch 2.6 and newer
            stack.enter_context(set_stance("force_eager"))
        stack.enter_context(_seen_triton(counter))
        stack.enter_context(_Mode(counter))
        return stack.pop_all()


def _seen_triton(counter: FlopCounter) -> ExitStack:
    """Note every launch of a Triton kernel, which PyTorch's dispatcher never sees, as unknown."""
    jit = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    undo = ExitStack()
    if jit is None:
        return undo
    run = jit.run

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            counter.add(f"triton::{getattr(kernel, '__name__', 'kernel')}", "", None)
        return run(kernel, *args, **kwargs)

    jit.run = noted
    undo.callback(setattr, jit, "run", run)
    return undo
