"""Optimizers and their wrappers: find the inner optimizers, and hook their steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from nvprof_kit._instrument.patches import Patch
from nvprof_kit.errors import UsageError

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
        return [one for part in optimizer for one in innermost(part)]
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
        for one in undo:
            one()
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
