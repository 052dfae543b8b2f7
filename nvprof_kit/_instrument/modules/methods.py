"""`instrument_method`: range the calls of a module that do not go through ``module(...)``."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from nvprof_kit._instrument.modules.calls import Calls
from nvprof_kit._instrument.modules.checkpointing import Recomputes
from nvprof_kit._instrument.modules.classes import BARE
from nvprof_kit._instrument.modules.ranged import annotated
from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.ranges.layer import layer_of
from nvprof_kit._instrument.ranges.layer_range import LayerScope
from nvprof_kit._instrument.ranges.wrapping import wrap
from nvprof_kit.errors import UsageError


class InstrumentedMethod:
    """The handle of an instrumented method; as a context manager it takes the ranges back at the end."""

    def __init__(self, method: _Method, instance: nn.Module | None) -> None:
        self._method = method
        self._instance = None if instance is None else weakref.ref(instance)

    def remove(self) -> None:
        """Range the method no more; a second call does nothing."""
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
    """Range a method of a module, or of all modules of a class, forward and backward.

    `annotate_model` ranges what goes through ``module(...)``. This is for the rest, such as ``block.forward(x)`` called
    by hand and ``vae.encode(x)``. The range of ``forward`` has the module's path, and a call that the annotation ranges
    already is not ranged again; that of another method has the method's name behind the path (``vae.encode``). A module
    that no annotation ranges is called by its class.

    The method is replaced on the class, so copies and pickles of a module carry nothing; other instances are passed by.

    Args:
        target: A module, or a class of modules.
        name: The method.

    Returns:
        The handle, whose ``remove()`` takes the ranges back.

    Raises:
        UsageError: There is no such method, or it is no plain method of a module.
    """
    instance = target if isinstance(target, nn.Module) else None
    cls = type(target) if isinstance(target, nn.Module) else target
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise UsageError(f"instrument_method takes a module or a class of modules, not {target!r}")
    if not inspect.isfunction(inspect.getattr_static(cls, name, None)) or (instance and name in vars(instance)):
        raise UsageError(f"{cls.__name__}.{name} is no method of the class that could be ranged")
    method = _methods.get((cls, name))
    if method is None:
        method = _methods[cls, name] = _Method(cls, name)
    if instance is None:
        method.every = True
    else:
        method.instances.add(instance)
    return InstrumentedMethod(method, instance)


class _Method:
    """A method of a class, replaced by one that ranges its calls on some or all instances.

    Attributes:
        every: Whether all instances are ranged.
        instances: Those that are ranged by themselves.
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
        """Give the class its method back, unless someone has replaced it since."""
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
    """The forward of an annotated module: its hooks' range where they have just opened one, else one like it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward, ranged once."""
        backend = state.backend
        owners = backend.thread.here.owners if backend is not None else []
        if owners and owners[-1] is self._calls.layer:
            return function(*args, **kwargs)
        outputs = None
        self._calls.enter(None, args, kwargs)
        try:
            outputs = function(*args, **kwargs)
            return outputs
        finally:
            self._calls.leave(None, None, outputs)
