"""Decorated ``nn.Module`` classes: each instance is a layer, numbered in the order of creation."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.layer import Layer, layer_of
from nvprof_kit._instrument.ranges.wrapping import ScopeOf, wrap
from nvprof_kit.errors import UsageError


class RangesCalls:
    """Base of the objects with hooks that range a module's calls."""

    __slots__ = ()


def is_ranged(module: nn.Module) -> bool:
    """Whether our hooks range the module's calls."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), RangesCalls) for hook in hooks)


def range_class(cls: type[Any], scope_of: ScopeOf | None, scope: Callable[[Layer], Any]) -> type[Any]:
    """Range the forward of every instance of a module class; returns the class.

    Args:
        cls: A subclass of ``nn.Module``; changed in place.
        scope_of: Returns the scope of a call; None names each instance ``ClassName.N`` in the order of creation.
        scope: Returns the scope of a layer.

    Raises:
        UsageError: The class is not an ``nn.Module``.
    """
    if not issubclass(cls, nn.Module):
        raise UsageError(f"layer_range on class {cls.__name__}: only nn.Module classes; decorate its methods instead")
    if state.mode == "off":
        return cls
    scope_of_call = scope_of or _numbered(cls, scope)

    def scope_unless_ranged(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return BARE if is_ranged(module) else scope_of_call(module, *args, **kwargs)

    cls.forward = wrap(cls.forward, scope_unless_ranged)
    return cls


class _Bare:
    """Scope without a range, for a module that `annotate_model` already ranges."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


BARE = _Bare()


def _numbered(cls: type[nn.Module], make: Callable[[Layer], Any]) -> Callable[..., Any]:
    """Number the instances of a class; a copy gets its number in its first call."""
    scopes: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
    numbers = itertools.count()
    create = cls.__init__

    def scope_of(module: nn.Module, *_args: Any, **_kwargs: Any) -> Any:
        scope = scopes.get(module)
        if scope is None:
            scope = scopes[module] = make(layer_of(f"{cls.__name__}.{next(numbers)}"))
        return scope

    @functools.wraps(create)
    def numbered(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        scope_of(self)

    cls.__init__ = numbered
    return scope_of
