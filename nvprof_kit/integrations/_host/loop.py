"""The loop of a framework: steps, phases, micro-batches and evaluations as ranges, and which steps are recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from nvprof_kit._capture.recorder.record import record
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import annotate_model
from nvprof_kit._instrument.loop.guard import never_fails, warn
from nvprof_kit._instrument.loop.inferred import InferredLoop, running, stop_inferring
from nvprof_kit._instrument.loop.schedule import Schedule, Switch
from nvprof_kit._instrument.modules.annotate import ModelAnnotation, _by_structure
from nvprof_kit._instrument.modules.blocks import Submodule, class_name, unwrapped
from nvprof_kit._instrument.modules.hooks import annotated
from nvprof_kit.errors import UsageError


class HostLoop(InferredLoop):
    """The loop of a framework.

    Args:
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`. None reads the environment
            variable ``NVPROF_KIT_SCHEDULE``. If it is not set, an attached tool records all steps.
        path: Trace file of the embedded recorder, as of `nvprof_kit.record`.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`; None if the program annotates the model.
        own_steps: The framework does not report steps, so they are inferred.

    Attributes:
        handles: The annotations that this loop created.

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
        super().__init__(own_steps=own_steps)
        self._asked = None if schedule is None else Schedule.of(schedule)
        self._off = schedule is not None and self._asked is None
        self._path = path
        self._annotation = annotation
        self.handles: list[ModelAnnotation] = []
        self._windows: record | None = None
        self._names: list[str] = []

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
        named = _named(models)
        stop_inferring()
        other = running()
        if other is not None and other is not self and other.contains_any(list(named.values())):
            return
        self.end()
        if self._off:
            return
        self.number = first
        self._names = [name or class_name(unwrapped(model)) for name, model in named.items()]
        if self._annotation is not None:
            self.handles += annotate_models(named, self._annotation)
        self.start(named.values(), entered, watch=watch)
        if not self.broken:
            self._windows = record(self._path, schedule=self._schedule() or False)
            self._windows.__enter__()

    @never_fails
    def annotate_too(self, model: nn.Module) -> None:
        """Annotate another model, under the name of its class, and watch its calls."""
        if self._annotation is not None and model not in session.annotated and not is_ranged(model):
            name = free_name(class_name(unwrapped(model)), self._names)
            self._names.append(name)
            self.handles.append(annotate_under(name, model))
        self.add(model)

    def _schedule(self) -> Schedule | None:
        """The schedule of the argument or of the environment."""
        if self._asked is not None:
            return self._asked
        try:
            return Schedule.of(None)
        except UsageError as error:
            warn(f"{error}; nothing is recorded by it")
            return None

    @never_fails
    def step_end(self) -> None:
        """End the step; the next begins with the fetch of its data."""
        if self.runs:
            super().step_end()
            if self._windows is not None:
                self._windows.step()

    def undo(self) -> None:
        """End the loop, and with it a running window."""
        super().undo()
        windows, self._windows = self._windows, None
        if windows is not None:
            windows.__exit__(None, None, None)


def listens() -> bool:
    """Whether ranges are being recorded, or the environment requests a recording."""
    if session.mode == "off":
        return False
    try:
        enabled = Schedule.of(None) is not None
    except UsageError:
        enabled = False
    return session.backend is not None or enabled


def _named(models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Models by the prefix of their paths; the prefix of a single model is empty."""
    if isinstance(models, nn.Module):
        return {"": models}
    if isinstance(models, Mapping):
        return dict(models)
    return {f"part{index}" if len(models) > 1 else "": model for index, model in enumerate(models)}


def annotate_models(named: Mapping[str, nn.Module], options: Mapping[str, Any]) -> list[ModelAnnotation]:
    """Annotate models by the prefix of their paths; skips models that the program has annotated.

    Raises:
        UsageError: The options contradict each other.
    """
    return [
        annotate_model(model, **{**options, "steps": False}) if not prefix else annotate_under(prefix, model)
        for prefix, model in named.items()
        if model not in session.annotated and not is_ranged(model)
    ]


def annotate_under(prefix: str, model: nn.Module) -> ModelAnnotation:
    """Annotate a model with a prefix for the paths of its layers, to distinguish several models.

    Raises:
        UsageError: The model is already annotated.
    """
    return ModelAnnotation(model, _by_structure(Submodule(prefix, model)), backward=True, root=prefix)


def free_name(name: str, taken: Collection[str]) -> str:
    """A name, with a number behind it if others have it: ``Critic``, ``Critic2``."""
    numbered = (name if number == 1 else f"{name}{number}" for number in range(1, len(taken) + 2))
    return next(candidate for candidate in numbered if candidate not in taken)


def is_ranged(model: nn.Module) -> bool:
    """Whether another annotation ranges a module of the model, such as the program's own of a wrapped model."""
    return any(module in annotated for module in model.modules())
