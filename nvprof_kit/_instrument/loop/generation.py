"""Inference as steps: each outermost call of the model is one step, prefill or decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.compile.hidden import Kept, pause_while_tracing
from nvprof_kit._instrument.loop.loop import phase, step
from nvprof_kit._instrument.patches import Hook
from nvprof_kit._instrument.ranges.layer_range import Scope
from nvprof_kit._instrument.torch_compat import skip_compiling
from nvprof_kit.errors import require

_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""Names of the arguments with a call's tokens, as in transformers."""

PhaseOf = Callable[[tuple[Any, ...], Mapping[str, Any]], str]
"""Returns the phase of a call from its positional and keyword arguments."""


class generation:
    """Range each model call of a generation loop as a step with a phase.

    ```python
    with nvprof_kit.generation(model):
        model.generate(prompt, max_new_tokens=64)
    ```

    A step lasts from one model call to the next, so sampling and scheduling belong to the step before them. The last
    step ends with the block. Enter the block on the thread that calls the model, and after `nvprof_kit.record` if you
    use it.

    Args:
        model: The module that the loop calls, the one passed to `nvprof_kit.annotate_model`.
        first: Number of the first step.
        phase_of: Returns the phase of a call from its positional and keyword arguments. By default, a call with more
            than one token per sequence is ``prefill``, any other ``decode``.
    """

    def __init__(self, model: nn.Module, *, first: int = 0, phase_of: PhaseOf | None = None) -> None:
        self._model = require(model, nn.Module, "generation: model", "a torch.nn.Module")
        self._number = first
        self._phase_of = phase_of or prefill_or_decode
        self._open: list[Scope] = []
        self._hook: Any = None
        self._kept: Kept | None = None
        self._over = False

    def __enter__(self) -> generation:
        self._over = False
        if session.backend is not None:
            self._kept = pause_while_tracing(self)
            skip_compiling(generation._begin)
            skip_compiling(Hook.call)
        try:
            self.resume()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        self.pause()
        self._end()
        self._over = True
        pausing, self._kept = self._kept, None
        if pausing is not None:
            pausing.remove()

    def pause(self) -> bool:
        """Remove the hook while torch.compile traces; returns whether it was installed."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
        return hook is not None

    def resume(self) -> None:
        """Install the hook again."""
        if not self._over:
            self._hook = self._model.register_forward_pre_hook(Hook(self._begin).call, prepend=True, with_kwargs=True)

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling() or session.backend is None:
            return
        self._end()
        self._open = [step(self._number), phase(self._phase_of(args, kwargs))]
        self._number += 1
        for scope in self._open:
            scope.__enter__()

    def _end(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)


def prefill_or_decode(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``prefill`` for a call with more than one token per sequence (shape ``(batch, tokens, …)``), else ``decode``.

    For an encoder-decoder model, the decoder's tokens count.
    """
    token_arguments = (kwargs.get(name) for name in _TOKENS)
    tokens = next((value for value in token_arguments if value is not None), args[0] if args else None)
    several = isinstance(tokens, torch.Tensor) and tokens.dim() > 1 and tokens.shape[1] > 1
    return "prefill" if several else "decode"
