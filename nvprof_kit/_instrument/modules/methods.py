"""`instrument_method`: range the calls of a module that do not go through ``module(...)``."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from nvprof_kit._instrument import session
from nvprof_kit._instrument.modules.hooks import Calls, annotated
from nvprof_kit._instrument.ranges.checkpointing import Recomputes
from nvprof_kit._instrument.ranges.layer import layer_of
from nvprof_kit._instrument.ranges.layer_range import BARE, LayerScope
from nvprof_kit._instrument.ranges.wrapping import wrap
from nvprof_kit.errors import UsageError


class InstrumentedMethod:
    """The handle of an instrumented method; as a context manager, it removes the ranges at the end."""

    def __init__(self, method: _Method, instance: nn.Module | None) -> None:
        self._method = method
        self._instance = None if instance is None else weakref.ref(instance)

    def remove(self) -> None:
        """Stop ranging the method; a second call does nothing."""
        instance = self._instance() if self._instance else None
        if instance is not None:
            self._method.instances.discard(instance)
        if self._instance is None:
            self._method.every = False
        if not self._method.every and not self._method.instances:
            self._method.uninstall()

    def __enter__(self) -> InstrumentedMethod:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()


def instrument_method(target: nn.Module | type[nn.Module], name: str = "forward") -> InstrumentedMethod:
    """Range a method of one module, or of all modules of a class, in forward and backward.

    `annotate_model` ranges calls of ``module(...)``. Use this function for other calls, such as ``block.forward(x)`` or
    ``vae.encode(x)``. The range of ``forward`` is named after the module's path; a call that is already ranged is not
    ranged twice. The range of another method is the path and the method's name (``vae.encode``). A module that is not
    annotated is named after its class.

    The method is replaced on the class, so copies and pickles of a module are unaffected. Other instances are not
    ranged.

    Args:
        target: A module, or a class of modules.
        name: Name of the method.

    Returns:
        A handle; its ``remove()`` restores the method.

    Raises:
        UsageError: The method does not exist, or is not a plain method of a module class.
    """
    instance = target if isinstance(target, nn.Module) else None
    cls = type(target) if isinstance(target, nn.Module) else target
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise UsageError(f"instrument_method takes a module or a class of modules, not {target!r}")
    if not inspect.isfunction(inspect.getattr_static(cls, name, None)) or (instance and name in vars(instance)):
        raise UsageError(f"{cls.__name__}.{name} is not a method of the class that can be ranged")
    method = _methods.get((cls, name))
    if method is None:
        method = _methods[cls, name] = _Method(cls, name)
    if instance is None:
        method.every = True
    else:
        method.instances.add(instance)
    return InstrumentedMethod(method, instance)


class _Method:
    """A replaced method of a class, which ranges calls on some or all instances.

    Attributes:
        every: Whether all instances are ranged.
        instances: The individually ranged instances.
    """

    def __init__(self, cls: type[nn.Module], name: str) -> None:
        self.every = False
        self.instances: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._cls = cls
        self._name = name
        self._own = vars(cls).get(name)
        self._wrapper = wrap(getattr(cls, name), self._scope)
        self._recomputes = Recomputes()
        self._recomputes.start()
        setattr(cls, name, self._wrapper)

    def uninstall(self) -> None:
        """Restore the method, unless other code has replaced it since."""
        _methods.pop((self._cls, self._name), None)
        self._recomputes.stop()
        if vars(self._cls).get(self._name) is not self._wrapper:
            return
        if self._own is None:
            delattr(self._cls, self._name)
        else:
            setattr(self._cls, self._name, self._own)

    def _scope(self, module: nn.Module, *_args: Any, **_kwargs: Any) -> Any:
        if not self.every and module not in self.instances:
            return BARE
        ranged = annotated.get(module)
        if self._name != "forward":
            path = ranged.path if ranged else type(module).__name__
            return LayerScope(layer_of(f"{path}.{self._name}"))
        return _ForwardScope(ranged.calls) if ranged else LayerScope(layer_of(type(module).__name__))


_methods: dict[tuple[type[nn.Module], str], _Method] = {}


class _ForwardScope:
    """The forward of an annotated module: uses the range that its hooks have just opened, else opens the same range."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward with exactly one range."""
        backend = session.backend
        owners = backend.thread.position.owners if backend is not None else []
        if owners and owners[-1] is self._calls.layer:
            return function(*args, **kwargs)
        outputs = None
        self._calls.enter(None, args, kwargs)
        try:
            outputs = function(*args, **kwargs)
            return outputs
        finally:
            self._calls.leave(None, None, outputs)
