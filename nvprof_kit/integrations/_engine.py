"""What the integrations of serving engines share: the loop of a process, and what goes around its runner's methods.

A function around a method takes the method, its object and the arguments of the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import never_fails
from nvprof_kit._instrument.ranges.ranges import Layer
from nvprof_kit.integrations._host import HostLoop, annotate_under


class EngineLoop(HostLoop):
    """The steps of a serving process, defined by the model runner that loads its model first.

    The runner of a draft model, which loads later, has its layers ranged under ``draft``; its calls are part of the
    first runner's step.
    """

    def __init__(self) -> None:
        super().__init__(annotation={"backward": False})
        self._runner: weakref.ref[Any] | None = None

    def _is_first(self, runner: Any) -> bool:
        return self._runner is not None and self._runner() is runner

    @never_fails
    def loaded(self, runner: Any, model: nn.Module) -> None:
        """A runner has loaded its model."""
        if self._runner is None or self._runner() is None or self._is_first(runner):
            self._runner = weakref.ref(runner)
            self.begin(model, watch=False)
        elif model not in session.annotated:
            self.handles.append(annotate_under("draft", model))

    @never_fails
    def called(self, runner: Any, phase: str) -> None:
        """A runner runs a batch; this ends the previous step if sampling did not."""
        self.sampled(runner)
        if self._is_first(runner):
            self.step_begin()
            self.phase(phase)

    @never_fails
    def sampled(self, runner: Any) -> None:
        """A runner has sampled; this ends the step. Work until the next batch belongs to no step."""
        if self._is_first(runner) and self.in_step:
            self.step_end()

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Capture the CUDA graph of a batch size in the block; layers are named ``graph8.model.layers.3``."""
        layers = [] if session.backend is None else [layer for handle in self.handles for layer in handle.layers]
        captured = [Layer(f"graph{size}.{layer.path}", backward=False) for layer in layers]
        if layers:
            self.phase("capture")
        for layer, in_graph in zip(layers, captured, strict=True):
            layer.swap(in_graph)
        try:
            yield
        finally:
            for layer, in_graph in zip(layers, captured, strict=True):
                layer.swap(in_graph)
            self.phase(None)


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


def load_model(method: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Annotate the model that a runner has loaded."""
    result = method(runner, *args, **kwargs)
    engine().loaded(runner, getattr(runner, "model", None) or runner.get_model())
    return result


def sample(method: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """End the step with its sampling."""
    try:
        return method(runner, *args, **kwargs)
    finally:
        engine().sampled(runner)
