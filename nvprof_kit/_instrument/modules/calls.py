"""Our code around the calls of modules, where torch.compile leaves it out of what it compiles."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Handle, Patch, Patches, instead, nothing, skip_compiling, uncompiled_itself
from nvprof_kit._instrument.ranges.backward import Recomputes
from nvprof_kit._instrument.ranges.layer_range import wrap
from nvprof_kit._instrument.ranges.ranges import Block, Layer, ModuleCall, layer_of, put_around
from nvprof_kit.errors import UsageError

ranged: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
"""The layer of every module that is ranged by an annotation."""


def watch_calls(
    module: nn.Module,
    before: Callable[[tuple[Any, ...], dict[str, Any]], object],
    after: Callable[[], object] = nothing,
) -> list[Handle]:
    """Call functions before, with the arguments, and after each call of a module, outside of its range."""
    skip_compiling(before)
    skip_compiling(after)
    return [put_around(called, partial(_watched, before, after)) for called in Compiled(module).called(module)]


@uncompiled_itself
def _watched(before: Any, after: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before(args, kwargs)
    try:
        return function(*args, **kwargs)
    finally:
        after()


class Compiled:
    """The modules of a model that are compiled so far.

    Args:
        model: The model.

    Attributes:
        regions: Modules that are compiled as a whole: wrapped, in place, or by their ``forward``.
        inside: Modules inside these.
    """

    def __init__(self, model: nn.Module) -> None:
        self.regions: set[nn.Module] = set()
        self.inside: set[nn.Module] = set()
        self._wrappers: dict[nn.Module, list[nn.Module]] = {}
        if "torch._dynamo.eval_frame" not in sys.modules:
            return
        modules = set(model.modules())
        self._tracked = wrappers.hold(self)
        for wrapper in list(_wrappers):
            wrapped = getattr(wrapper, "_orig_mod", None)
            exports = getattr(getattr(wrapper, "dynamo_ctx", None), "export", False)
            if wrapped in modules and not exports:  # torch.export of PyTorch 2.4 keeps its wrapper for a while
                self.regions.add(wrapped)
                call = getattr(wrapper.forward, "_torchdynamo_orig_callable", None)
                if getattr(call, "__self__", None) is not wrapped:  # else the module's call runs in Python
                    self._wrappers.setdefault(wrapped, []).append(wrapper)
        for module in modules:
            in_place = ModuleCall.of(module)[0] is not None
            forward, is_off = module.forward, getattr(module.forward, "_torchdynamo_disable", False)
            if in_place or (hasattr(forward, "_torchdynamo_orig_callable") and not is_off):
                self.regions.add(module)
        for region in self.regions:
            wrapped = getattr(region, "_orig_mod", region)
            self.inside.update(inner for inner in wrapped.modules() if inner is not wrapped)

    def called(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose calls are those of the module: itself, or the wrappers that compile its call."""
        return self._wrappers.get(module, [module])


def _follow_calls() -> list[Patch]:
    def compile_inside(compile_call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        _, functions = ModuleCall.of(module)
        compile_call(module, *args, **kwargs)
        ModuleCall.set(module, ModuleCall.of(module)[0], functions)

    def replicate_call(replicate: Callable[..., Any], module: nn.Module) -> Any:
        replica = replicate(module)  # has the module's attributes, and so its call
        ModuleCall.set(replica, *ModuleCall.of(module))
        return replica

    return [
        Patch(nn.Module, "compile", instead(compile_inside)),
        Patch(nn.Module, "_replicate_for_data_parallel", instead(replicate_call)),
    ]


followers = Patches(_follow_calls)
"""Keeps what is around a module's calls when they are compiled in place, and in replicas of ``nn.DataParallel``."""


_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Known wrappers of `torch.compile`; modules have no reference to their wrappers."""


def _follow_wrappers() -> list[Any]:
    """Find the wrappers so far by their class, and further ones when their module is registered."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:
        wrapper = compiler.OptimizedModule
        _wrappers.update(referrer for referrer in gc.get_referrers(wrapper) if type(referrer) is wrapper)
    return [register_module_module_registration_hook(_note)]


def _note(wrapper: nn.Module, name: str, _module: nn.Module | None) -> None:
    if name == "_orig_mod":
        _wrappers.add(wrapper)


wrappers = Patches(_follow_wrappers)
"""Tracks the wrappers that `torch.compile` creates, for `Compiled`, while a user needs them."""


class InstrumentedMethod:
    """The handle of an instrumented method; as a context manager, it removes the ranges at the end."""

    def __init__(self, method: _Method, instance: nn.Module | None) -> None:
        self._method = method
        self._instance = None if instance is None else weakref.ref(instance)
        method.handles.add(self)

    def ranges(self, module: nn.Module) -> bool:
        """Whether it ranges the method of this module."""
        return self._instance is None or self._instance() is module

    def remove(self) -> None:
        """Stop ranging the method; a second call does nothing."""
        handles = self._method.handles
        if self in handles:
            handles.remove(self)
            if not handles:
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
    return InstrumentedMethod(method, instance)


class _Method:
    """A replaced method of a class, which ranges calls on some or all instances.

    Attributes:
        handles: Those that are not removed.
    """

    def __init__(self, cls: type[nn.Module], name: str) -> None:
        self.handles: set[InstrumentedMethod] = set()
        self._cls = cls
        self._name = name
        self._recomputes = Recomputes(self)
        self._patch = Patch(cls, name, lambda method: wrap(method, self._block))

    def uninstall(self) -> None:
        """Restore the method, unless other code has replaced it since."""
        _methods.pop((self._cls, self._name), None)
        self._recomputes.remove()
        self._patch.remove()

    def _block(self, module: nn.Module, /, *_args: Any, **_kwargs: Any) -> Block | None:
        if not any(handle.ranges(module) for handle in self.handles):
            return None
        layer = ranged.get(module)
        path = layer.path if layer else type(module).__name__
        if self._name != "forward":
            return layer_of(f"{path}.{self._name}")
        owners = [] if session.backend is None else session.backend.thread.position.owners
        if layer is not None and owners and owners[-1] is layer:  # the module's call ranges it
            return None
        return layer or layer_of(path)


_methods: dict[tuple[type[nn.Module], str], _Method] = {}
