"""The ranges of a loop: a step, a phase in it, and possibly a micro-batch around the phase; at most one of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.generation import prefill_or_decode
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit.integrations._host.guard import Guarded, never_fails
from nvprof_kit.names import Category


class LoopRanges(Guarded, ABC):
    """Opens and closes the ranges of one loop, on its thread.

    Attributes:
        number: Number of the current or next step.
    """

    def __init__(self) -> None:
        self.number = 0
        self._reset()

    def _reset(self) -> None:
        self._step: Range | None = None
        self._phase: Range | None = None
        self._micro: Range | None = None
        self._micro_batches = 0

    @property
    @abstractmethod
    def runs(self) -> bool:
        """Whether the loop is running."""

    @property
    def in_step(self) -> bool:
        """Whether a step's range is open."""
        return self._step is not None

    @never_fails
    def phase(self, name: str | None) -> None:
        """Change the phase; None ends the current phase."""
        if not self.runs:
            return
        if self._phase is not None and self._phase.text == name and self._phase.backend is session.backend:
            return
        self._close(self._phase)
        self._phase = None if name is None else self._opened(Range(name, Category.PHASE))

    def _open_step(self) -> None:
        """Open the step's range, unless it is open."""
        if self._step is None or self._step.backend is not session.backend:
            self.phase(None)
            self._step = self._opened(Range(f"step {self.number}", Category.STEP, self.number))

    def _open_micro_batch(self) -> None:
        self._micro_batches += 1
        self.phase(None)
        self._micro = self._opened(Range(f"micro-batch {self._micro_batches}", Category.USER))

    def _is_in(self, phase: str) -> bool:
        return self._phase is not None and self._phase.text == phase

    def _abandon_step(self) -> None:
        self._close(self._phase)
        self._close(self._step)
        self._step = self._phase = self._micro = None

    def _opened(self, range_: Range) -> Range | None:
        backend = session.backend
        if backend is None:
            return None
        backend.open(range_, range_)
        return range_

    def _close(self, range_: Range | None) -> None:
        backend = session.backend
        if range_ is not None and backend is not None and range_.backend is backend:
            backend.close(range_)


def inference_phase(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``prefill`` or ``decode`` for a call with tokens, ``forward`` for any other."""
    tokens = args[:1] if args else tuple(kwargs[name] for name in ("input_ids", "decoder_input_ids") if name in kwargs)
    integral = any(hasattr(one, "dtype") and not one.dtype.is_floating_point for one in tokens)
    return prefill_or_decode(args, kwargs) if integral else "forward"
