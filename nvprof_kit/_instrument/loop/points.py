"""Hooks on PyTorch that detect the phases of any training loop, while ranges are emitted.

Frameworks report where steps begin and end. Data fetches, model calls, backward passes and optimizer steps are detected
in PyTorch itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from nvprof_kit._instrument.compile.hidden import pause_while_tracing
from nvprof_kit._instrument.modules.annotation import Annotation, Removable
from nvprof_kit._instrument.modules.hooks import Compiled
from nvprof_kit._instrument.patches import Hook, Patch
from nvprof_kit._instrument.torch_compat import skip_compiling

NO_KWARGS: Mapping[str, Any] = {}


class Watcher(Protocol):
    """The receiver of the events."""

    def fetching(self, dataset: object) -> None:
        """A DataLoader is asked for its next batch."""

    def calling(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called."""

    def call_ended(self, model: nn.Module) -> None:
        """The call of the model has ended."""

    def backward_begins(self) -> None:
        """A backward pass begins."""

    def backward_ends(self) -> None:
        """A backward pass ends."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self) -> None:
        """An optimizer's step ends."""


class LoopHooks(Annotation):
    """Hooks of a loop, installed only while ranges are emitted. A failure becomes a warning.

    Args:
        owner: The loop, a `guard.Guarded`; held weakly.
    """

    def enable(self) -> None:
        """Install the hooks, if not installed."""
        try:
            super().enable()
        except Exception as error:
            owner = self._owner()
            if owner is not None:
                owner.give_up(error)

    def _hold(self, _owner: Any) -> Iterator[Removable]:
        yield pause_while_tracing(self)


class Calls(LoopHooks):
    """Hooks that report the calls of models.

    Args:
        watcher: The receiver of the events; held weakly.
        models: The models that the loop calls; held weakly.
        ends: Report the ends of the calls too; needed if one of the models calls another.
    """

    def __init__(self, watcher: Watcher, models: Sequence[nn.Module], ends: bool = False) -> None:
        self._models = [weakref.ref(model) for model in models]
        self.ends = ends
        super().__init__(watcher)

    def _install(self, owner: Any) -> Iterator[Removable]:
        for model in [model for reference in self._models if (model := reference()) is not None]:
            for hookable in Compiled(model).places(model):
                yield hookable.register_forward_pre_hook(self._begin(owner, model), prepend=True, with_kwargs=True)
                if self.ends:
                    yield hookable.register_forward_hook(self._end(owner, model), always_call=True)

    def _begin(self, owner: Any, model: nn.Module) -> Any:
        called = weakref.ref(model)

        # without kwargs if another hook of the same call has just removed this one
        def call(_place: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = NO_KWARGS) -> None:
            if not torch.compiler.is_dynamo_compiling():
                owner.calling(called(), args, kwargs)

        skip_compiling(call)
        return Hook(call).call

    def _end(self, owner: Any, model: nn.Module) -> Any:
        called = weakref.ref(model)

        def call(*_call: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                owner.call_ended(called())

        skip_compiling(call)
        return Hook(call).call


class Points(Calls):
    """The hooks of a loop: the calls of its models, and data, backward pass and optimizer in PyTorch."""

    def _install(self, owner: Any) -> Iterator[Removable]:
        yield from super()._install(owner)
        yield Patch(dataloader._BaseDataLoaderIter, "__next__", functools.partial(_reporting_fetch, owner))
        yield Patch(torch.autograd, "backward", functools.partial(_reporting_backward, owner))
        yield register_optimizer_step_pre_hook(lambda optimizer, *_call: owner.optimizer_begins(optimizer))
        yield register_optimizer_step_post_hook(lambda *_call: owner.optimizer_ends())


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

    skip_compiling(reported, callees=False)
    return reported
