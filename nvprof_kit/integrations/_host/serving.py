"""The model runner of a serving engine: layers, prefill and decode steps, and CUDA graphs by batch size.

The shared part of `vllm` and `sglang`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.guard import never_fails
from nvprof_kit._instrument.modules.annotate import ModelAnnotation
from nvprof_kit._instrument.ranges.layer import layer_of
from nvprof_kit._instrument.ranges.layer_range import LayerScope
from nvprof_kit.integrations._host.loop import HostLoop, annotate_under


class EngineLoop(HostLoop):
    """The steps of an engine process, defined by the model runner that loads its model first.

    The runner of a draft model, which loads later, has its layers ranged under ``draft``; its calls are part of the
    first runner's step.
    """

    def __init__(self) -> None:
        super().__init__(annotation={"backward": False})
        self._runner: weakref.ref[Any] | None = None

    @never_fails
    def loaded(self, runner: Any, model: nn.Module) -> None:
        """A runner has loaded its model."""
        if self._runner is None or self._runner() is None or self._runner() is runner:
            self._runner = weakref.ref(runner)
            self.begin(model, watch=False)
        elif model not in session.annotated:
            self.handles.append(annotate_under("draft", model))

    @never_fails
    def called(self, runner: Any, phase: str) -> None:
        """A runner runs a batch; this ends the previous step if sampling did not."""
        if self._is_first(runner):
            if self.in_step:
                self.step_end()
            self.step_begin()
            self.phase(phase)

    @never_fails
    def sampled(self, runner: Any) -> None:
        """A runner has sampled; this ends the step. Work until the next batch belongs to no step."""
        if self._is_first(runner) and self.in_step:
            self.step_end()

    def _is_first(self, runner: Any) -> bool:
        return self._runner is not None and self._runner() is runner

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Capture the CUDA graph of a batch size in the block; layers are named ``graph8.model.layers.3``."""
        undo = self._rename(size) or []
        try:
            yield
        finally:
            for back in undo:
                back()
            self.phase(None)

    @never_fails
    def _rename(self, size: int) -> list[Callable[[], None]]:
        if session.backend is None:
            return []
        self.phase("capture")
        handles: list[ModelAnnotation] = self.handles
        return [_renamed(ranged.calls, size) for handle in handles for ranged in handle._ranged.values()]


def _renamed(calls: Any, size: int) -> Callable[[], None]:
    """Rename a layer for the graph of a batch size; returns a function that restores the name."""
    layer, scope = calls.layer, calls.scope
    calls.layer = layer_of(f"graph{size}.{layer.path}", backward=False)
    calls.scope = LayerScope(calls.layer)

    def back() -> None:
        calls.layer, calls.scope = layer, scope

    return back


def phase_of(tokens: list[int], decode_tokens: int = 1) -> str:
    """``decode`` if all sequences of a batch have at most `decode_tokens` new tokens, ``prefill`` if all have more,
    else ``mixed``.
    """
    decoding = sum(count <= decode_tokens for count in tokens)
    return "decode" if decoding == len(tokens) else "mixed" if decoding else "prefill"


_engine: EngineLoop | None = None


def engine() -> EngineLoop:
    """The engine loop of this process."""
    global _engine  # noqa: PLW0603
    if _engine is None:
        _engine = EngineLoop()
    return _engine
