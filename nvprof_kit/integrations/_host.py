"""What the integrations share: the loop of a framework, the models that it calls, and the engines that serve one.

Steps, phases, micro-batches and evaluations are ranges; a schedule says which steps are recorded.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from nvprof_kit._capture.recorder.record import record
from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.annotate import ModelAnnotation, annotate_model
from nvprof_kit._instrument.loop.inferred import InferredLoop, running, stop_inferring
from nvprof_kit._instrument.loop.schedule import Schedule, Switch
from nvprof_kit._instrument.modules.blocks import Submodule, by_structure, children, class_name, unwrapped
from nvprof_kit._instrument.modules.calls import ranged
from nvprof_kit._instrument.patches import Removable, never_fails, warn
from nvprof_kit._instrument.ranges.ranges import Layer
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

_FRAMES = 8
"""Maximum number of callers that `calling_object` looks at."""


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
        self._schedule: Switch = None if schedule is None else Schedule.of(schedule) or False
        self._path = path
        self._annotation = annotation
        self.handles: list[ModelAnnotation] = []
        self._recording: record | None = None
        self._names: list[str] = []

    @never_fails
    def begin(
        self,
        models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        *,
        first: int = 0,
        watch: bool = True,
        with_parts: bool = False,
    ) -> None:
        """Begin the loop. If the loop of another framework already runs on the same model, this one stays inactive.

        Args:
            models: The called models: one model, its pipeline stages, or several by name.
            first: Number of the first step.
            watch: Detect phases through hooks on PyTorch; False if the framework reports all of them.
            with_parts: The framework calls the children of the models directly too.
        """
        if isinstance(models, nn.Module):
            model_of_name: Mapping[str, nn.Module] = {"": models}
        elif isinstance(models, Mapping):
            model_of_name = models
        else:
            model_of_name = {f"part{index}" if len(models) > 1 else "": model for index, model in enumerate(models)}
        stop_inferring()
        other = running()
        if other is not None and other is not self and other.contains_any(list(model_of_name.values())):
            return
        self.end()
        if self._schedule is False:
            return
        self.number = first
        self._names = [name or class_name(unwrapped(model)) for name, model in model_of_name.items()]
        for name, model in model_of_name.items():
            if self._annotation is not None and not is_ranged(model):
                options = {**self._annotation, "steps": False}
                self.handles.append(annotate_under(name, model) if name else annotate_model(model, **options))
        modules = [child.module for model in model_of_name.values() for child in children(Submodule("", model))]
        entered = [module for module in modules if any(True for _ in module.parameters())] if with_parts else []
        self.start(model_of_name.values(), entered, watch=watch)
        if not self.broken:
            try:
                self._recording = record(self._path, schedule=self._schedule)
            except UsageError as error:  # of the environment's schedule
                warn(f"{error}; nothing is recorded by it")
                return
            self._recording.__enter__()

    @never_fails
    def annotate_too(self, model: nn.Module) -> None:
        """Annotate another model, under the name of its class, and watch its calls."""
        if self._annotation is not None and not is_ranged(model):
            name = free_name(class_name(unwrapped(model)), self._names)
            self._names.append(name)
            self.handles.append(annotate_under(name, model))
        self.add(model)

    @never_fails
    def step_end(self) -> None:
        """End the step; the next begins with the fetch of its data."""
        if self.runs:
            super().step_end()
            if self._recording is not None:
                self._recording.step()

    def undo(self) -> None:
        """End the loop, and with it a running window."""
        super().undo()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)


class Hosted:
    """What the classes of all hosts have in common: the loop that they drive, and its end.

    Hosts call some methods by names of their own, and with arguments that do not matter here. A method that
    `never_fails` ends the loop with a warning if it raises.

    Args:
        schedule: Which steps to record, in any form of `nvprof_kit.Schedule.of`.
        path: Trace file of the embedded recorder; ``run.json.gz`` by default.
        annotation: Keyword arguments of `nvprof_kit.annotate_model`.

    Raises:
        UsageError: The schedule is invalid.

    Attributes:
        loop: The loop.
        patches: Patches of the host, removed by `close`.
    """

    own_steps: ClassVar[bool] = False
    """The framework does not report steps, so they are inferred."""

    def __init__(self, schedule: Switch = None, path: str | Path | None = None, **annotation: Any) -> None:
        self.loop = HostLoop(schedule, path=path, annotation=annotation, own_steps=self.own_steps)
        self.patches: list[Removable] = []

    @property
    def broken(self) -> bool:
        """Whether an exception has ended the loop."""
        return self.loop.broken

    def give_up(self, error: Exception) -> None:
        """End the loop with a warning."""
        self.loop.give_up(error)

    def step_ends(self, *_event: Any, **_about: Any) -> None:
        """The optimizer has stepped."""
        self.loop.step_end()

    def evaluation_begins(self, *_event: Any, **_about: Any) -> None:
        """An evaluation begins."""
        self.loop.evaluation_begins()

    def evaluation_ends(self, *_event: Any, **_about: Any) -> None:
        """An evaluation has ended."""
        self.loop.evaluation_ends()

    def close(self, *_event: Any, **_about: Any) -> None:
        """End the loop and write what was recorded."""
        while self.patches:
            self.patches.pop().remove()
        self.loop.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def listens() -> bool:
    """Whether ranges are being recorded, or the environment requests a recording."""
    if session.mode == "off":
        return False
    try:
        return session.backend is not None or Schedule.of(None) is not None
    except UsageError:
        return False


def annotate_under(prefix: str, model: nn.Module) -> ModelAnnotation:
    """Annotate a model with a prefix for the paths of its layers, to distinguish several models.

    Raises:
        UsageError: The model is already annotated.
    """
    return ModelAnnotation(model, by_structure(Submodule(prefix, model)), root=prefix)


def free_name(name: str, taken: Collection[str]) -> str:
    """A name, with a number behind it if others have it: ``Critic``, ``Critic2``."""
    numbered = (name if number == 1 else f"{name}{number}" for number in range(1, len(taken) + 2))
    return next(candidate for candidate in numbered if candidate not in taken)


def is_ranged(model: nn.Module) -> bool:
    """Whether the program annotates the model, or an annotation ranges one of its modules."""
    return model in session.annotated or any(module in ranged for module in model.modules())


def calling_object(attribute: str) -> Any:
    """The nearest ``self`` among the callers with this attribute; None if none of the last eight frames has one."""
    frames = islice(traceback.walk_stack(sys._getframe(1)), _FRAMES)
    callers = (frame.f_locals.get("self") for frame, _ in frames)
    return next((caller for caller in callers if hasattr(caller, attribute)), None)


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


def phase_of(tokens: list[int]) -> str:
    """``decode`` if all sequences of a batch have one new token at most, ``prefill`` if none has, else ``mixed``."""
    decoding = sum(count <= 1 for count in tokens)
    return "decode" if decoding == len(tokens) else "mixed" if decoding else "prefill"


_engine: EngineLoop | None = None


def engine() -> EngineLoop:
    """The engine loop of this process."""
    global _engine  # noqa: PLW0603
    if _engine is None:
        _engine = EngineLoop()
    return _engine


def load_model(method: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Annotate the model that a runner has loaded."""
    result = method(runner, *args, **kwargs)
    engine().loaded(runner, getattr(runner, "model", None) or runner.get_model())
    return result


def sample(method: Callable[..., Any], runner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """End the step with its sampling."""
    try:
        return method(runner, *args, **kwargs)
    finally:
        engine().sampled(runner)
