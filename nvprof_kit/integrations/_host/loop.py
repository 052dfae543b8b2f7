"""The loop of a framework: steps, phases, micro-batches and evaluations as ranges.

The shared part of the integrations. A framework reports when a step ends and when it evaluates, as far as it can;
`points.Points` detects the rest. Hooks are installed only while ranges are emitted.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import is_grad_enabled as _is_grad_enabled
from torch import nn

from nvprof_kit._capture.recorder.scheduled import VARIABLE as SCHEDULE
from nvprof_kit._capture.recorder.scheduled import scheduled
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.schedule import Schedule, Switch, profiling_schedule
from nvprof_kit._instrument.modules.annotate import ModelAnnotation
from nvprof_kit._instrument.modules.blocks import class_name, unwrapped
from nvprof_kit.errors import UsageError
from nvprof_kit.integrations._host.guard import never_fails, warn
from nvprof_kit.integrations._host.models import annotate_models, annotate_under, free_name, is_ranged
from nvprof_kit.integrations._host.own_end import OwnEnd
from nvprof_kit.integrations._host.points import Points
from nvprof_kit.integrations._host.ranges import LoopRanges, inference_phase

_running: weakref.ref[HostLoop] | None = None
"""The loop that emits ranges; the outermost one if frameworks are nested."""


@atexit.register
def _end_running() -> None:
    """End an open loop at exit, because tools drop ranges that are still open."""
    loop = _running() if _running is not None else None
    if loop is not None:
        loop.end()


class HostLoop(LoopRanges):
    """The loop of a framework.

    Args:
        schedule: Which steps to record, in any form of `nvprof_kit.profiling_schedule`. None reads the environment
            variables ``NVPROF_KIT_SCHEDULE``, then ``NVPROF_KIT_PROFILING``. If neither is set, an attached tool
            records all steps.
        path: Trace file of the embedded recorder, as in `nvprof_kit.scheduled`.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`; None if the program annotates the model.
        own_steps: The framework does not report steps. A step then ends when an optimizer has stepped and the next
            batch is fetched, or when all optimizers have stepped and a model is called; without an optimizer, at each
            call of a model.

    Attributes:
        accumulation: Micro-batches per step; each has a range if there are several.
        train_dataset: The training dataset, if known; fetching from another one is an evaluation.
        trains: Whether the loop trains; None if not yet known.
        handles: The annotations that this loop created.
        updates_itself: Whether a program without a known optimizer has none: its step then ends after a backward pass.

    Raises:
        UsageError: The schedule is invalid.
    """

    def __init__(
        self,
        schedule: Switch = None,
        *,
        path: str | Path | None = None,
        annotation: Mapping[str, Any] | None = None,
        own_steps: bool = False,
    ) -> None:
        super().__init__()
        self._asked = None if schedule is None else profiling_schedule(schedule)
        self._off = schedule is not None and self._asked is None
        self._path = path
        self._annotation = annotation
        self._own_steps = own_steps
        self.accumulation = 1
        self.train_dataset: object = None
        self.trains: bool | None = None
        self.handles: list[ModelAnnotation] = []
        self._points: Points | None = None
        self._windows: scheduled | None = None
        self._thread = 0
        self._models: list[nn.Module] = []
        self._entered: list[nn.Module] = []
        self._names: list[str] = []
        self._own_end = OwnEnd()
        self.updates_itself = False

    def _reset(self) -> None:
        super()._reset()
        self._evaluates = False
        self._in_optimizer = False
        self._stepped = False
        self._inside: nn.Module | None = None

    @property
    def runs(self) -> bool:
        """Whether the loop is running."""
        return self._windows is not None

    @property
    def optimizer_has_stepped(self) -> bool:
        """Whether an optimizer has stepped in the current step."""
        return self._stepped

    @never_fails
    def begin(
        self,
        models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        *,
        first: int = 0,
        watch: bool = True,
        entered: Sequence[nn.Module] = (),
    ) -> None:
        """Begin the loop. If the loop of another framework already runs on the same model, this one stays inactive.

        Args:
            models: The called models: one model, its pipeline stages, or several by name.
            first: Number of the first step.
            watch: Detect phases through hooks on PyTorch; False if the framework reports all of them.
            entered: Parts of a model that the framework calls directly.
        """
        global _running  # noqa: PLW0603
        named = _named(models)
        other = _running() if _running is not None else None
        if other is not None and other is not self and other.runs:
            if other.contains_any(list(named.values())):
                return
            other.end()
        self.end()
        if self._off:
            return
        self.number, self._thread = first, threading.get_ident()
        _running = weakref.ref(self)
        self._models, self._entered = list(named.values()), list(entered)
        self._names = [name or class_name(unwrapped(model)) for name, model in named.items()]
        if self._annotation is not None:
            self.handles += annotate_models(named, self._annotation)
        if watch:
            self._points = self._watched()
        if self.broken:
            return
        self._windows = scheduled(self._schedule(), self._path)
        self._windows.__enter__()

    @never_fails
    def add(self, model: nn.Module) -> None:
        """Watch the calls of another model too; the caller annotates it."""
        if self._points is None or any(model is one for one in self._models):
            return
        self._models.append(model)
        self._points.remove()
        self._points = self._watched()

    @never_fails
    def annotate_too(self, model: nn.Module) -> None:
        """Annotate another model, under the name of its class, and watch its calls."""
        if self._annotation is not None and model not in session.annotated and not is_ranged(model):
            name = free_name(class_name(unwrapped(model)), self._names)
            self._names.append(name)
            self.handles.append(annotate_under(name, model))
        self.add(model)

    def _watched(self) -> Points:
        models = [*self._models, *self._entered]
        inside = {id(part) for model in models for part in model.modules() if part is not model}
        return Points(self, models, ends=self._own_steps and any(id(model) in inside for model in models))

    @never_fails
    def know_optimizer(self, optimizer: Any) -> None:
        """An optimizer was made, or steps."""
        self._own_end.know(optimizer)

    def _schedule(self) -> Schedule | None:
        """The schedule; None lets `scheduled` read ``NVPROF_KIT_SCHEDULE``."""
        if self._asked is not None or _environment(SCHEDULE):
            return self._asked
        try:
            return profiling_schedule(None)
        except UsageError as error:
            warn(f"{error}; nothing is recorded by it")
            return None

    def contains_any(self, models: Sequence[nn.Module]) -> bool:
        """Whether one of these models is, contains, or is part of a model of this loop."""
        own = {id(module) for model in self._models for module in model.modules()}
        tops = {id(model) for model in self._models}
        return any(id(model) in own or not tops.isdisjoint(map(id, model.modules())) for model in models)

    @never_fails
    def end(self) -> None:
        """End the loop: close open ranges and end a running window."""
        windows, self._windows = self._windows, None
        points, self._points = self._points, None
        self._close(self._phase)
        self._close(self._step)
        self._reset()
        if points is not None:
            points.remove()
        if windows is not None:
            windows.__exit__(None, None, None)

    def undo(self) -> None:
        """Remove what is installed, after a failure."""
        self._close(self._step or self._phase)
        windows, self._windows = self._windows, None
        points, self._points = self._points, None
        if points is not None:
            points.remove()
        if windows is not None:
            windows.__exit__(None, None, None)

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
        if self._windows is None:
            return
        self._abandon_step()
        self._stepped = False
        self._own_end.restart()
        self._micro_batches = 0
        self.number += 1
        self._windows.step()

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

    # ---- called by the hooks of `points`

    @never_fails
    def fetching(self, dataset: object) -> None:
        """A batch is fetched; this begins a step or an evaluation."""
        if not self._is_mine():
            return
        if self._is_of_evaluation(dataset):
            self._end_own_step()
            self.evaluation_begins()
            return
        if self.trains is False:
            return
        self.evaluation_ends()
        self._end_own_step()
        self._ensure_step()
        self.phase("data")

    def _is_of_evaluation(self, dataset: object) -> bool:
        if self.train_dataset is not None:
            return dataset is not self.train_dataset
        return self.trains is not False and not self._is_training()

    def _is_training(self) -> bool:
        return any(model.training for model in self._models)

    @never_fails
    def calling(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A model is called, for training, evaluation or inference."""
        if not self._is_mine() or self._is_in("backward") or self._inside is not None:
            return
        if self._points is not None and self._points.ends:
            self._inside = model
        if self._own_steps and self.trains is False:
            trained = _is_grad_enabled() and model.training
            self._calling_for_inference("forward" if trained else inference_phase(args, kwargs))
            return
        if not (_is_grad_enabled() or model.training or self._is_frozen_in_training(model)):
            self._calling_without_gradient(kwargs)
            return
        self.evaluation_ends()
        if self._own_end.is_due():
            self._end_own_step()
        self._ensure_step()
        if self.accumulation > 1 and self._micro is None:
            self._open_micro_batch()
        self.phase("forward")

    def _calling_for_inference(self, phase: str) -> None:
        """Each call is a step, with gradients too, which programs often leave on."""
        self._stepped = self._step is not None
        self._end_own_step()
        self._ensure_step()
        self.phase(phase)

    @never_fails
    def call_ended(self, model: nn.Module) -> None:
        """The call of a model has ended."""
        if self._inside is model and threading.get_ident() == self._thread:
            self._inside = None

    def _is_frozen_in_training(self, model: nn.Module) -> bool:
        """Whether a model in evaluation mode takes part in training: a teacher, a reference, a frozen encoder."""
        if not self._own_steps or self.trains is False or not self._own_end.is_of_others(model):
            return False
        others = [one for one in self._models if one is not model]
        return not others or self._is_training()

    def _calling_without_gradient(self, kwargs: Mapping[str, Any]) -> None:
        self._end_own_step()
        if self._evaluates:
            self.phase("eval")
        elif self._step is not None and not self._is_in("forward"):
            self.phase("generate" if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None else "eval")
        elif self._step is None:
            self.evaluation_begins()

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
            if self.updates_itself and not self._own_end.any:
                self._stepped = True
            if self._in_optimizer:  # the backward ran in a closure of the optimizer
                self.phase("optimizer")

    @never_fails
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        if self._is_mine():
            self._own_end.steps(optimizer)
            self._in_optimizer = True
            self.phase("optimizer")

    @never_fails
    def optimizer_ends(self) -> None:
        """An optimizer step ends."""
        if self._is_mine():
            self._in_optimizer = False
            self._stepped = True
            self.phase(None)

    def _is_mine(self) -> bool:
        return self.runs and session.backend is not None and threading.get_ident() == self._thread

    def _end_own_step(self) -> None:
        if self._own_steps and self._stepped:
            self.step_end()

    def _ensure_step(self) -> None:
        self.evaluation_ends()
        self._open_step()


def listens() -> bool:
    """Whether ranges are being recorded, or the environment requests a recording."""
    if session.mode == "off":
        return False
    try:
        wanted = profiling_schedule(None) is not None
    except UsageError:
        wanted = False
    return session.backend is not None or wanted or bool(_environment(SCHEDULE))


def _environment(name: str) -> str | None:
    return os.environ.get(name)


def _named(models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Models by the prefix of their paths; the prefix of a single model is empty."""
    if isinstance(models, nn.Module):
        return {"": models}
    if isinstance(models, Mapping):
        return dict(models)
    return {f"part{index}" if len(models) > 1 else "": model for index, model in enumerate(models)}
