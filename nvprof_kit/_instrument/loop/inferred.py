"""Infer the steps of a loop, and its phases, micro-batches and evaluations, from what happens in PyTorch.

Hooks report data fetches, model calls, backward passes and optimizer steps. A framework may report where steps end
and when it evaluates (`integrations`); otherwise a step ends when an optimizer has stepped and the next batch is
fetched, or when all optimizers have stepped and a model is called; without an optimizer, when a model is called after
its weights have changed; without training, at each call of a model.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop import loop as user_loop
from nvprof_kit._instrument.loop.loop import inference_phase
from nvprof_kit._instrument.modules.calls import watch_calls
from nvprof_kit._instrument.patches import Guarded, Patch, Removable, Untraced, around, before, never_fails
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit._instrument.session import Annotation
from nvprof_kit.names import Category


class LoopHooks(Annotation):
    """Hooks of a loop, installed only while ranges are emitted. A failure becomes a warning.

    Args:
        loop: The loop, a `patches.Guarded`; held weakly.
        install: Installs the hooks of the loop; yields the handle of each. It must not hold the loop.
    """

    def __init__(self, loop: Any, install: Callable[[Any], Iterable[Removable]]) -> None:
        self._install_for = install
        super().__init__(loop)

    def enable(self) -> None:
        """Install the hooks, if not installed."""
        try:
            super().enable()
        except Exception as error:
            loop = self._owner()
            if loop is not None:
                loop.give_up(error)

    def _install(self, _loop: Any) -> list[Removable]:
        def install() -> Iterable[Removable]:
            loop = self._owner()
            return () if loop is None else self._install_for(loop)

        return [Untraced(install)]


class Optimizers:
    """The optimizers of a program, and those of them that have stepped in the current step.

    A program with several optimizers, such as one of a generator and one of a discriminator, has them step one after
    the other, with calls of the models in between. A step is over when all have stepped. An optimizer that was made
    but never steps is left out once another one steps twice without it.

    Attributes:
        known: All of them.
    """

    def __init__(self) -> None:
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._expected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def know(self, optimizer: Any) -> None:
        """An optimizer was made."""
        self.known.add(optimizer)
        self._expected.add(optimizer)

    def steps(self, optimizer: Any) -> None:
        """An optimizer steps."""
        if optimizer in self._stepped:
            self._expected = weakref.WeakSet(self._stepped)
        if optimizer not in self.known:  # its first step, which nobody waited for, ends the round of the others
            self._stepped.update(self._expected)
        self.know(optimizer)
        self._stepped.add(optimizer)

    def restart(self) -> None:
        """A step has ended."""
        self._stepped = weakref.WeakSet()

    def is_due(self) -> bool:
        """Whether every optimizer that is expected to step has stepped, or another one with parameters of it."""
        waiting = [optimizer for optimizer in self._expected if optimizer not in self._stepped]
        return all(not _parameters(self._stepped).isdisjoint(_parameters([optimizer])) for optimizer in waiting)

    def are_of_others(self, model: nn.Module) -> bool:
        """Whether there are optimizers, and none has a parameter of this model."""
        updated = _parameters(self.known)
        return bool(updated) and updated.isdisjoint(map(id, model.parameters()))


def _parameters(optimizers: Iterable[Any]) -> set[int]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


class InferredLoop(Guarded):
    """The ranges of one loop, on the thread that runs it: a step, a phase in it, and possibly a micro-batch.

    Args:
        own_steps: Nobody reports steps, so they are inferred.
        phases: Range phases, micro-batches and evaluations too, not only steps.

    Attributes:
        number: Number of the current or next step.
        accumulation: Micro-batches per step; each has a range if there are several.
        train_dataset: The training dataset, if known; fetching from another one is an evaluation.
        trains: Whether the loop trains; None if not yet known.
        runs: Whether the loop is running.
        optimizer_has_stepped: Whether an optimizer has stepped in the current step.
    """

    def __init__(self, *, own_steps: bool = False, phases: bool = True) -> None:
        self.number = 0
        self.accumulation = 1
        self.train_dataset: object = None
        self.trains: bool | None = None
        self.runs = False
        self._own_steps = own_steps
        self._opens = {Category.STEP, Category.PHASE, Category.USER} if phases else {Category.STEP}
        self._hooks: LoopHooks | None = None
        self._thread = 0
        self._models: list[weakref.ref[nn.Module]] = []
        self._entered: list[weakref.ref[nn.Module]] = []
        self._optimizers = Optimizers()
        self._reset()

    def _reset(self) -> None:
        self._step: Range | None = None
        self._phase: Range | None = None
        self._micro: Range | None = None
        self._micro_batches = 0
        self._evaluates = False
        self._in_optimizer = False
        self.optimizer_has_stepped = False
        self._inside: Callable[[], Any] | None = None
        self._versions: list[int] | None = None

    @property
    def in_step(self) -> bool:
        """Whether a step's range is open."""
        return self._step is not None

    def models(self) -> list[nn.Module]:
        """The models that the loop calls and that still exist."""
        return [model for reference in self._models if (model := reference()) is not None]

    def contains_any(self, models: Sequence[nn.Module]) -> bool:
        """Whether one of these models is, contains, or is part of a model of this loop."""
        inside = {id(module) for model in self.models() for module in model.modules()}
        tops = {id(model) for model in self.models()}
        return any(id(model) in inside or not tops.isdisjoint(map(id, model.modules())) for model in models)

    def start(self, models: Iterable[nn.Module], entered: Sequence[nn.Module] = (), *, watch: bool = True) -> None:
        """Begin the loop; another loop that runs ends.

        Args:
            models: The called models; held weakly.
            entered: Parts of a model that are called directly.
            watch: Infer phases and steps from PyTorch; False if a framework reports all of them.
        """
        global _running  # noqa: PLW0603
        other = running()
        if other is not None and other is not self:
            other.end()
        _running = weakref.ref(self)
        self._models = [weakref.ref(model) for model in models]
        self._entered = [weakref.ref(module) for module in entered]
        self._thread = threading.get_ident()
        self.runs = True
        if watch:
            self._watch(self.models())

    @never_fails
    def add(self, model: nn.Module) -> None:
        """Watch the calls of another model too; the caller annotates it."""
        if self._hooks is not None and not any(model is watched for watched in self.models()):
            self._watch([*self.models(), model])

    @never_fails
    def drop(self, model: nn.Module | None) -> None:
        """Watch a model no longer, nor those that are gone; the loop ends with its last one."""
        models = [watched for watched in self.models() if watched is not model]
        if not models:
            self.end()
        elif self._hooks is not None:
            self._watch(models)

    def _watch(self, models: Sequence[nn.Module]) -> None:
        self._models = [weakref.ref(model) for model in models]
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = LoopHooks(self, type(self)._hook)

    def _hook(self) -> Iterator[Removable]:
        """Hooks on the calls of the models, and on data, backward pass and optimizer in PyTorch."""
        for reference in [*self._models, *self._entered]:
            model = reference()
            if model is not None:
                yield from watch_calls(model, partial(self.calling, reference), partial(self.call_ended, reference))
        yield Patch(dataloader._BaseDataLoaderIter, "__next__", before(self.fetching))
        yield Patch(torch.autograd, "backward", around(self.backward_begins, self.backward_ends))
        yield register_optimizer_step_pre_hook(lambda optimizer, *_call: self.optimizer_begins(optimizer))
        yield register_optimizer_step_post_hook(lambda *_call: self.optimizer_ends())

    @never_fails
    def know_optimizer(self, optimizer: Any) -> None:
        """An optimizer was made, or steps."""
        self._optimizers.know(optimizer)

    @never_fails
    def end(self) -> None:
        """End the loop: close open ranges."""
        self.undo()
        self._reset()

    def undo(self) -> None:
        """Close open ranges and remove what is installed; also after a failure."""
        self._abandon_step()
        self.runs = False
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()

    @never_fails
    def phase(self, name: str | None) -> None:
        """Change the phase; None ends the current phase."""
        if not self.runs or (self._is_in(name) and self._phase.backend is session.backend):  # type: ignore[union-attr]
            return
        self._close(self._phase)
        self._phase = None if name is None else self._opened(Range(name, Category.PHASE))

    def _is_in(self, phase: str | None) -> bool:
        return self._phase is not None and self._phase.text == phase

    def _abandon_step(self) -> None:
        self._close(self._phase)
        self._close(self._step)
        self._step = self._phase = self._micro = None

    def _opened(self, range_: Range) -> Range | None:
        backend = session.backend
        if backend is None:
            return None
        if range_.category in self._opens:
            backend.open(range_, range_)
        else:
            range_.backend = backend
        return range_

    def _close(self, range_: Range | None) -> None:
        backend = session.backend
        if range_ is not None and backend is not None and range_.backend is backend:
            backend.close(range_)

    # ---- called by a framework

    @never_fails
    def step_begin(self, number: int | None = None) -> None:
        """Begin a step, unless it began with the fetch of its data."""
        if not self.runs:
            return
        if number is not None and number != self.number:
            self._abandon_step()
            self.number = number
        self._ensure_step()

    @never_fails
    def step_end(self) -> None:
        """End the step; the next begins with the fetch of its data."""
        if not self.runs:
            return
        self._abandon_step()
        self.optimizer_has_stepped = False
        self._optimizers.restart()
        self._micro_batches = 0
        self.number += 1

    @never_fails
    def evaluation_begins(self) -> None:
        """Begin an evaluation, which belongs to no step."""
        if not self.runs or self._evaluates:
            return
        self._abandon_step()
        self._evaluates = True
        self.phase("eval")

    @never_fails
    def evaluation_ends(self) -> None:
        """End the evaluation."""
        if self._evaluates:
            self._evaluates = False
            self.phase(None)

    # ---- called by the hooks

    @never_fails
    def fetching(self, iterator: Any) -> None:
        """A batch is fetched; this begins a step or an evaluation."""
        if not self._is_mine():
            return
        # a loader of known length that has returned its last batch; a sampler may raise anything if it has no length
        with suppress(Exception):
            if iterator._num_yielded >= len(iterator):
                return
        if self.train_dataset is not None:
            evaluates = getattr(iterator, "_dataset", None) is not self.train_dataset
        else:
            evaluates = self.trains is not False and not self._is_training()
        if evaluates:
            self._end_own_step()
            self.evaluation_begins()
        elif self.trains is not False:
            self.evaluation_ends()
            self._end_own_step()
            self._ensure_step()
            self.phase("data")

    def _serves_training(self, model: nn.Module) -> bool:
        """Whether a model in evaluation mode takes part in training: a teacher, a reference, a frozen encoder."""
        is_beside = self._own_steps and self._optimizers.are_of_others(model)
        return is_beside and (len(self.models()) == 1 or self._is_training())

    def _is_training(self) -> bool:
        return any(model.training for model in self.models())

    @never_fails
    def calling(self, called: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A model is called, for training, evaluation or inference."""
        if not self._is_mine() or self._is_in("backward") or self._inside is not None:
            return
        model, with_gradient = called(), is_grad_enabled()
        if self._own_steps:
            self._inside = called
            if Category.PHASE not in self._opens and self.trains is False and with_gradient and model.training:
                self.trains = None  # a model in training mode with gradients trains, also before its first backward
            if not self._optimizers.known:
                self._note_weights()
        if self._own_steps and self.trains is False:  # each call is a step, with gradients too, which are often left on
            self.optimizer_has_stepped = self._step is not None
            self._end_own_step()
            self._ensure_step()
            self.phase("forward" if with_gradient and model.training else inference_phase(args, kwargs))
        elif with_gradient or model.training or self._serves_training(model):
            self.evaluation_ends()
            if self._optimizers.is_due():
                self._end_own_step()
            self._ensure_step()
            if self.accumulation > 1 and self._micro is None:
                self._micro_batches += 1
                self.phase(None)
                self._micro = self._opened(Range(f"micro-batch {self._micro_batches}", Category.USER))
            self.phase("forward")
        else:
            self._end_own_step()
            if self._evaluates:
                self.phase("eval")
            elif self._step is None:
                self.evaluation_begins()
            elif not self._is_in("forward"):
                generates = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None
                self.phase("generate" if generates else "eval")

    @never_fails
    def call_ended(self, called: Callable[[], Any]) -> None:
        """The call of a model has ended."""
        if self._inside is called and threading.get_ident() == self._thread:
            self._inside = None

    def _note_weights(self) -> None:
        """Without a known optimizer, a step ends where weights have changed."""
        trained = (next((w for w in model.parameters() if w.requires_grad), None) for model in self.models())
        versions = [weight._version for weight in trained if weight is not None]
        self.optimizer_has_stepped |= self._step is not None and self._versions not in (None, versions)
        self._versions = versions

    @never_fails
    def backward_begins(self) -> None:
        """A backward pass begins."""
        if self._is_mine():
            self.trains = True
            self._ensure_step()
            self.phase("backward")

    @never_fails
    def backward_ends(self) -> None:
        """A backward pass ends, and with it the micro-batch."""
        if self._is_mine():
            self.phase(None)
            self._close(self._micro)
            self._micro = None
            if self._in_optimizer:  # the backward ran in a closure of the optimizer
                self.phase("optimizer")

    @never_fails
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        if self._is_mine():
            self._optimizers.steps(optimizer)
            self._in_optimizer = True
            self.phase("optimizer")

    @never_fails
    def optimizer_ends(self) -> None:
        """An optimizer step ends."""
        if self._is_mine():
            self._in_optimizer = False
            self.optimizer_has_stepped = True
            self.phase(None)

    @never_fails
    def leave(self, category: Category) -> None:
        """The program opens a step or a phase itself: this loop opens no phases, and steps only until the program does.

        From then on, the program's steps end those of this loop.
        """
        if self._is_mine() and Category.PHASE in self._opens:
            self.phase(None)
        self._opens -= {Category.PHASE, Category.USER, category}
        if category is Category.STEP:
            self._own_steps = False
            if threading.get_ident() == self._thread:
                self.step_end()

    def _is_mine(self) -> bool:
        return self.runs and session.backend is not None and threading.get_ident() == self._thread

    def _end_own_step(self) -> None:
        if self._own_steps and self.optimizer_has_stepped:
            with self._around_phases():
                self.step_end()

    def _ensure_step(self) -> None:
        """Open the step's range, unless it is open."""
        self.evaluation_ends()
        if self._step is None or self._step.backend is not session.backend:
            self.phase(None)
            with self._around_phases():
                self._step = self._opened(Range(f"step {self.number}", Category.STEP, self.number))

    @contextmanager
    def _around_phases(self) -> Iterator[None]:
        """Close the phases that the program itself has open, and open them again: a step is around its phases."""
        backend = session.backend if Category.STEP in self._opens else None
        phases: list[tuple[Range, object]] = []
        if backend is not None:
            for owner in reversed(backend.thread.position.owners):
                range_ = getattr(owner, "range", None)
                if range_ is None or range_.category is not Category.PHASE:
                    break
                phases.append((range_, owner))
            for _, owner in phases:
                backend.close(owner)
        yield
        if backend is not None:
            for range_, owner in reversed(phases):
                backend.open(range_, owner)


_running: weakref.ref[InferredLoop] | None = None


def running() -> InferredLoop | None:
    """The loop that emits ranges; the outermost one if frameworks are nested."""
    loop = _running() if _running is not None else None
    return loop if loop is not None and loop.runs else None


@atexit.register
def _end_running() -> None:
    """End an open loop at exit, because tools drop ranges that are still open."""
    loop = running()
    if loop is not None:
        loop.end()


_own: InferredLoop | None = None
"""The loop of a program that only annotates its models: its steps are inferred until it ranges steps itself."""


def infer_steps(model: nn.Module) -> None:
    """Infer the steps of the loop that calls a model, unless an integration ranges it or the program is in a step."""
    global _own  # noqa: PLW0603
    other, owners = running(), [] if session.backend is None else session.backend.thread.position.owners
    if other is not None and other is not _own and other.models():
        return
    if any(isinstance(owner, user_loop.step) for owner in owners):
        return
    if _own is not None and _own.runs:
        _own.add(model)
        return
    _own = InferredLoop(own_steps=True, phases=False)
    _own.trains = False
    _own.start([model])


def stop_inferring(category: Category = Category.STEP) -> None:
    """Stop altogether, because the program ranges its steps itself."""
    if category is Category.STEP and _own is not None and _own.runs:
        _own.end()


user_loop.takes_over.append(stop_inferring)


def drop_model(model: nn.Module | None) -> None:
    """Stop for one model, or for models that are gone."""
    if _own is not None and _own.runs:
        _own.drop(model)
