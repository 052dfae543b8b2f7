"""The ranges of a training or decoding loop: steps, phases, marks, data, optimizer and the calls of a generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Patch, Removable, Untraced, around, uncompiled
from nvprof_kit._instrument.ranges.layer_range import F, Scope, wrap
from nvprof_kit._instrument.ranges.ranges import Block, Range
from nvprof_kit._instrument.ranks import mark_rank
from nvprof_kit._instrument.session import Annotation, replace_in_notebook
from nvprof_kit.errors import UsageError, require
from nvprof_kit.names import Category

if TYPE_CHECKING:
    from torch import nn


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
            raise UsageError.of("not-an-optimizer", kind=type(optimizer).__name__)
        if not hasattr(optimizer, "__dict__"):
            raise UsageError.of("optimizer-with-slots", kind=type(optimizer).__name__)
        return [optimizer]
    return innermost(inner)


def hook_steps(optimizers: Iterable[Any], before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[Removable]:
    """Call functions before and after each step of the optimizers.

    Uses the step hooks of ``torch.optim.Optimizer``; for any other object, wraps its method ``step``.

    Args:
        optimizers: The optimizers, see `innermost`.
        before: Called with the optimizer before a step.
        after: Called with the optimizer after a step.

    Yields:
        The hooks, as they are installed.
    """
    for optimizer in optimizers:
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            yield optimizer.register_step_pre_hook(lambda optimizer, *_call: before(optimizer))
            yield optimizer.register_step_post_hook(lambda optimizer, *_call: after(optimizer))
        else:
            yield Patch(optimizer, "step", around(partial(before, optimizer), partial(after, optimizer)))


Batch = TypeVar("Batch")


takes_over: list[Callable[[Category], object]] = []
"""Called before the program opens a step or a phase, with the category: what infers such ranges leaves them to it."""


@uncompiled
def leave_to_program(category: Category) -> None:
    """Tell what infers steps or phases that the program ranges them itself."""
    for leave in takes_over:
        leave(category)


class OwnRange(Scope):
    """A step or a phase that the program opens itself."""

    __slots__ = ()

    @uncompiled
    def __enter__(self) -> OwnRange:
        leave_to_program(self.range.category)
        super().__enter__()
        return self

    def __call__(self, function: F) -> F:
        """Decorate a function; each call is a range."""
        return wrap(function, lambda *_args, **_kwargs: self)


class step(OwnRange):
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
        if on_step is not None:
            on_step()
        if self._number is None:
            self.range = _step_range(next(self._counter))
        super().__enter__()
        mark_rank()
        return self


on_step: Callable[[], None] | None = None
"""Called at the beginning of each step, before its range opens."""


def _step_range(number: int) -> Range:
    return Range(f"step {number}", Category.STEP, number)


_ranges: dict[tuple[str, Category], Range] = {}
_MAX_RANGES = 4096


def _range(text: str, category: Category) -> Range:
    range_ = _ranges.get((text, category))  # and no cache of functools, which warns in a compiled function
    if range_ is None:
        range_ = Range(require(text, str, f"the text of a {category.value} range", "a text"), category)
        if len(_ranges) < _MAX_RANGES:
            _ranges[text, category] = range_
    return range_


def phase(name: str) -> Scope:
    """Range a phase of the loop, such as ``forward``, ``backward`` or ``generate``; a context manager and a decorator.

    Args:
        name: Name of the phase.
    """
    return OwnRange(_range(name, Category.PHASE))


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
        fetch = OwnRange(_range("data", Category.PHASE))
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
        if type(optimizer) in (list, tuple):
            raise UsageError.of("several-optimizers", kind=type(optimizer).__name__)
        innermost(optimizer)  # raises for what is no optimizer
        replace_in_notebook(optimizer)
        super().__init__(optimizer)

    def _install(self, owner: Any) -> Iterator[Removable]:
        leave_to_program(Category.PHASE)  # else a loop's hook, which comes first, opens one at the first step
        block = Block(_range("optimizer", Category.PHASE))

        def before(_optimizer: object) -> None:
            block.__exit__(None, None, None)  # after a step that raised
            block.__enter__()

        return hook_steps(innermost(owner), before, lambda _optimizer: block.__exit__(None, None, None))


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
        from torch import nn

        self._model = require(model, nn.Module, "generation: model", "a torch.nn.Module")
        self._number = first
        self._phase_of = phase_of or prefill_or_decode
        self._ranges = ExitStack()
        self._calls: Untraced | None = None

    def __enter__(self) -> generation:
        from nvprof_kit._instrument.modules.calls import watch_calls

        leave_to_program(Category.STEP)  # else a loop that its first call begins has opened one by then
        self._calls = Untraced(lambda: watch_calls(self._model, self._begin))
        return self

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        if self._calls is not None:
            self._calls.remove()
        self._ranges.close()

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if session.backend is None:
            return
        self._ranges.close()
        self._ranges.enter_context(step(self._number))
        self._ranges.enter_context(phase(self._phase_of(args, kwargs)))
        self._number += 1


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    named = (kwargs.get(name) for name in _TOKENS)
    return next((value for value in named if value is not None), args[0] if args else None)


def prefill_or_decode(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``prefill`` for a call with more than one token per sequence (shape ``(batch, tokens, …)``), else ``decode``.

    For an encoder-decoder model, the decoder's tokens count.
    """
    tokens = _tokens(args, kwargs)
    return "prefill" if getattr(tokens, "ndim", 0) > 1 and tokens.shape[1] > 1 else "decode"


def inference_phase(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``prefill`` or ``decode`` for a call with tokens, ``forward`` for any other."""
    tokens = _tokens(args, kwargs)
    has_tokens = hasattr(tokens, "dtype") and not tokens.dtype.is_floating_point
    return prefill_or_decode(args, kwargs) if has_tokens else "forward"
