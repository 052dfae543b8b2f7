"""The ranges of a training or decoding loop: steps, phases, marks, data and optimizer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Generic, TypeVar

from nvprof_kit._instrument import session
from nvprof_kit._instrument.modules.annotation import Annotation, Removable, replace_in_notebook
from nvprof_kit._instrument.patches import Patch
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit._instrument.ranges.layer_range import F, Scope, keep
from nvprof_kit._instrument.ranges.wrapping import wrap
from nvprof_kit._instrument.ranks import mark_rank
from nvprof_kit.errors import UsageError, require
from nvprof_kit.names import Category

Undo = Callable[[], None]
Hook = Callable[..., Any]


def innermost(optimizer: Any) -> list[Any]:
    """The optimizers inside a wrapper (of accelerate, DeepSpeed, Megatron, …), or the optimizer itself.

    A wrapper has its optimizer as ``optimizer``. A wrapper of several, as in Megatron, has ``chained_optimizers`` or is
    a list.

    Raises:
        UsageError: The object is no optimizer, or holds something that is none.
    """
    if isinstance(optimizer, (list, tuple)):
        return [inner_optimizer for element in optimizer for inner_optimizer in innermost(element)]
    several = getattr(optimizer, "chained_optimizers", None)
    if isinstance(several, (list, tuple)):  # empty in Megatron on a rank without trainable weights
        return innermost(several)
    inner = getattr(optimizer, "optimizer", None)
    if inner is None or inner is optimizer or not (hasattr(inner, "param_groups") or hasattr(inner, "step")):
        if not callable(getattr(optimizer, "step", None)):
            raise UsageError(
                f"{type(optimizer).__name__} is not an optimizer: it has no method step(), and no optimizer inside; "
                "needed a torch.optim.Optimizer, a wrapper around one, or a list of them"
            )
        if not hasattr(optimizer, "__dict__"):
            raise UsageError(
                f"{type(optimizer).__name__} has __slots__, so its step cannot be observed; pass the one inside it"
            )
        return [optimizer]
    return innermost(inner)


def hook_steps(optimizers: Iterable[Any], before: Hook, after: Hook) -> list[Undo]:
    """Call functions before and after each step of the optimizers.

    Uses the step hooks of ``torch.optim.Optimizer``; for any other object, wraps its method ``step``.

    Args:
        optimizers: The optimizers, see `innermost`.
        before: Called with the optimizer before a step.
        after: Called with the optimizer after a step that did not raise.

    Returns:
        Functions that remove the hooks.
    """
    undo: list[Undo] = []
    try:
        for optimizer in optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                undo.append(optimizer.register_step_pre_hook(_called_with_optimizer(before)).remove)
                undo.append(optimizer.register_step_post_hook(_called_with_optimizer(after)).remove)
            else:
                undo.append(_wrap_step(optimizer, before, after))
    except BaseException:
        for remove in undo:
            remove()
        raise
    return undo


def _called_with_optimizer(hook: Hook) -> Hook:
    def called(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        hook(optimizer)

    return called


def _wrap_step(optimizer: Any, before: Hook, after: Hook) -> Undo:
    def around(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            before(optimizer)
            result = step(*args, **kwargs)
            after(optimizer)
            return result

        return hooked

    return Patch(optimizer, "step", around).remove


Batch = TypeVar("Batch")


class step(Scope):
    """Range one step: ``with step(12):``, or ``@step()`` on a function that runs one step.

    Args:
        number: Step number. By default, the steps of the process are counted from 0.
    """

    __slots__ = ("_number",)

    _counter = itertools.count()

    def __init__(self, number: int | None = None) -> None:
        require(number, (int, type(None)), "step: number", "a number")
        super().__init__(_step_range(-1 if number is None else number))
        self._number = number

    def __enter__(self) -> step:
        if takes_over is not None:
            takes_over()
        if on_step is not None:
            on_step()
        if self._number is None:
            self.range = _step_range(next(self._counter))
        super().__enter__()
        mark_rank()
        return self

    def __call__(self, function: F) -> F:
        """Decorate a function that runs one step."""
        return wrap(function, lambda *_args, **_kwargs: self)


on_step: Callable[[], None] | None = None
"""Called at the beginning of each step, before its range opens."""

takes_over: Callable[[], None] | None = None
"""Ends the inference of steps (`inferred`), because the program ranges its steps itself."""


def _step_range(number: int) -> Range:
    return Range(f"step {number}", Category.STEP, number)


@lru_cache(maxsize=1024)
def _range(text: str, category: Category) -> Range:
    return Range(require(text, str, f"the text of a {category.value} range", "a text"), category)


def phase(name: str) -> Scope:
    """Range a phase of the loop, such as ``forward``, ``backward`` or ``generate``; a context manager and a decorator.

    Args:
        name: Name of the phase.
    """
    try:
        return _phases[name]
    except KeyError:
        return keep(_phases, name, Scope(_range(name, Category.PHASE)))


_phases: dict[str, Scope] = {}


def mark(text: str) -> None:
    """Emit an NVTX mark, an instant on the timelines of nsys and ncu.

    Args:
        text: Text of the mark.
    """
    backend = session.backend
    if backend is not None:
        backend.mark(_range(text, Category.USER))


class annotate_dataloader(Generic[Batch]):
    """Wrap a data loader, or any iterable of batches, to range each fetch as phase ``data``.

    ```python
    for batch in annotate_dataloader(loader): ...
    ```

    The wrapper passes all other attributes through: ``len()``, ``dataset``, ``sampler``, …

    Args:
        loader: The data loader or iterable.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        fetch = Scope(_range("data", Category.PHASE))
        with fetch:
            batches = iter(self._loader)
        while True:
            with fetch:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # `_loader` is not set while unpickling
            raise AttributeError(name)
        return getattr(self._loader, name)


class annotate_optimizer(Annotation):
    """Range each ``step()`` of an optimizer as phase ``optimizer``.

    Args:
        optimizer: A ``torch.optim.Optimizer``, or a wrapper around one or several, as in Accelerate, DeepSpeed and
            Megatron.

    Raises:
        UsageError: The optimizer is already annotated. In a notebook, the annotation is replaced instead.
    """

    def __init__(self, optimizer: Any) -> None:
        innermost(optimizer)  # raises for what is no optimizer
        replace_in_notebook(optimizer)
        super().__init__(optimizer)

    def _install(self, owner: Any) -> list[Removable]:
        range_ = _range("optimizer", Category.PHASE)
        undo = hook_steps(innermost(owner), _Open(range_), _Close(range_))
        return [_Handle(remove) for remove in undo]


class _Handle:
    """A removable handle like that of a PyTorch hook."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Remove the hook."""
        self._undo()


class _Open:
    """Hook before an optimizer's step; first closes the range of an earlier step that raised."""

    def __init__(self, range_: Range) -> None:
        self._range = range_

    def __call__(self, *_call: object) -> None:
        backend = session.backend
        if backend is not None:
            backend.close(self._range)
            backend.open(self._range, self._range)


class _Close:
    """Hook after an optimizer's step."""

    def __init__(self, range_: Range) -> None:
        self._range = range_

    def __call__(self, *_call: object) -> None:
        backend = session.backend
        if backend is not None:
            backend.close(self._range)
