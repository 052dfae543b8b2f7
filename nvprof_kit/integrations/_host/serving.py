"""A serving engine's model runner: its layers, its prefill and decode steps, and its CUDA graphs by batch size.

What `vllm` and `sglang` share. The functions wrap methods of an engine's classes; they are handed the method first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nvprof_kit._instrument.modules.annotate import ModelAnnotation
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.layer import layer_of
from nvprof_kit._instrument.ranges.layer_range import LayerScope
from nvprof_kit.integrations._host.guard import never_fails
from nvprof_kit.integrations._host.loop import HostLoop
from nvprof_kit.integrations._host.models import annotate_under


class EngineLoop(HostLoop):
    """The steps of an engine's process: those of the model runner that loads a model first.

    A draft model's runner, which loads later, has its layers ranged under ``draft``; its calls are part of the step in
    which the first runner drafts.
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
        elif model not in state.annotated:
            self.handles.append(annotate_under("draft", model))

    @never_fails
    def called(self, runner: Any, phase: str) -> None:
        """A runner runs a batch: the step before is over, if its sampling did not end it."""
        if self._is_first(runner):
            if self.in_step:
                self.step_end()
            self.step_begin()
            self.phase(phase)

    @never_fails
    def sampled(self, runner: Any) -> None:
        """A runner has sampled: the step is over, and what the engine does until the next batch belongs to none."""
        if self._is_first(runner) and self.in_step:
            self.step_end()

    def _is_first(self, runner: Any) -> bool:
        return self._runner is not None and self._runner() is runner

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """The graph of a batch size is captured in the block: its layers are named ``graph8.model.layers.3``."""
        undo = self._rename(size) or []
        try:
            yield
        finally:
            for back in undo:
                back()
            self.phase(None)

    @never_fails
    def _rename(self, size: int) -> list[Callable[[], None]]:
        if state.backend is None:
            return []
        self.phase("capture")
        handles: list[ModelAnnotation] = self.handles
        return [_renamed(ranged.calls, size) for handle in handles for ranged in handle._ranged.values()]


def _renamed(calls: Any, size: int) -> Callable[[], None]:
    """Give a layer's calls the name that they have in the graph of a batch size; returns what takes that back."""
    layer, scope = calls.layer, calls.scope
    calls.layer = layer_of(f"graph{size}.{layer.path}", backward=False)
    calls.scope = LayerScope(calls.layer)

    def back() -> None:
        calls.layer, calls.scope = layer, scope

    return back


def phase_of(tokens: list[int], decode_tokens: int = 1) -> str:
    """``decode`` where every sequence of a batch has so many new tokens or fewer, ``prefill`` where each has more,
    ``mixed`` where some have.
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
