"""Hooks on PyTorch that detect the phases of any training loop, while ranges are emitted.

Frameworks report where steps begin and end. Data fetches, model calls, backward passes and optimizer steps are detected
in PyTorch itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from nvprof_kit._instrument.compile.hidden import keep_out
from nvprof_kit._instrument.compile.uncompiled import leave_to_python
from nvprof_kit._instrument.modules.annotation import Annotation, Removable
from nvprof_kit._instrument.modules.ranged import Compiled
from nvprof_kit._instrument.patches import Hook, Patch


class Watcher(Protocol):
    """The receiver of the events."""

    def fetching(self, dataset: object) -> None:
        """A DataLoader is asked for its next batch."""

    def calling(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called."""

    def backward_begins(self) -> None:
        """A backward pass begins."""

    def backward_ends(self) -> None:
        """A backward pass ends."""

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self) -> None:
        """An optimizer's step ends."""


class LoopHooks(Annotation):
    """Hooks of a loop, installed only while ranges are emitted. A failure becomes a warning.

    Args:
        owner: The loop, a `guard.Guarded`; held weakly.
    """

    def wake(self) -> None:
        """Install the hooks, if not installed."""
        try:
            super().wake()
        except Exception as error:
            owner = self._owner()
            if owner is not None:
                owner.give_up(error)

    def _hold(self, _owner: Any) -> Iterator[Removable]:
        yield keep_out(self)


class Points(LoopHooks):
    """The hooks of a loop.

    Args:
        watcher: The receiver of the events; held weakly.
        models: The models that the loop calls; kept alive as long as their hooks.
    """

    def __init__(self, watcher: Watcher, models: list[nn.Module]) -> None:
        self._models = models
        super().__init__(watcher)

    def _install(self, owner: Any) -> Iterator[Removable]:
        yield from self._hook_models(owner)
        yield Patch(dataloader._BaseDataLoaderIter, "__next__", functools.partial(_reporting_fetch, owner))
        yield Patch(torch.autograd, "backward", functools.partial(_reporting_backward, owner))
        yield register_optimizer_step_pre_hook(lambda *_call: owner.optimizer_begins())
        yield register_optimizer_step_post_hook(lambda *_call: owner.optimizer_ends())

    def _hook_models(self, owner: Any) -> list[Any]:
        def call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not torch.compiler.is_dynamo_compiling():
                owner.calling(model, args, kwargs)

        leave_to_python(call)
        return [
            place.register_forward_pre_hook(Hook(call).call, prepend=True, with_kwargs=True)
            for model in self._models
            for place in Compiled(model).places(model)
        ]


def _reporting_fetch(owner: Watcher, fetch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def reported(iterator: Any) -> Any:
        if not _is_exhausted(iterator):
            owner.fetching(getattr(iterator, "_dataset", None))
        return fetch(iterator)

    return reported


def _is_exhausted(iterator: Any) -> bool:
    """Whether a loader of known length has returned its last batch; this fetch then begins no step."""
    try:
        return bool(iterator._num_yielded >= len(iterator))
    except (AttributeError, TypeError):
        return False


def _reporting_backward(owner: Watcher, backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def reported(*args: Any, **kwargs: Any) -> Any:
        owner.backward_begins()
        try:
            return backward(*args, **kwargs)
        finally:
            owner.backward_ends()

    leave_to_python(reported, callees=False)
    return reported
