"""Hooks before and after each call of a layer, and where they belong after torch.compile.

A module that is compiled in place, by its ``forward``, or by a wrapper runs its hooks in Python, outside the compiled
code, so its own hooks range it. Where PyTorch's own code has the outermost part of ``forward``, as in a class of
``torch.nn`` or below ``@torch.no_grad()``, the wrapper compiles the hooks too, and since PyTorch 2.15 so does
`nn.Module.compile`.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Handle, Patch, Patches, nothing, uncompiled, uncompiled_itself
from nvprof_kit._instrument.ranges.backward import Recomputes
from nvprof_kit._instrument.ranges.layer_range import BARE, LayerScope, wrap
from nvprof_kit._instrument.ranges.ranges import Layer, RangesCalls, layer_of
from nvprof_kit.errors import UsageError

_compiling = torch.compiler.is_dynamo_compiling


class Ranged(RangesCalls):
    """A ranged module: its layer, and the hooks on its calls. In a copied or pickled module they do nothing.

    Args:
        layer: The layer; None for the hooks in a copy.
        module: The module; held weakly.

    Attributes:
        layer: The layer.
        scope: The ranges of the layer.
        path: Path of the module.
        module: A weak reference to the module.
        entered: Whether the layer was ever called.
        running: Approximate number of running calls on all threads; too high after a call that ended without its hook.
    """

    __slots__ = ("entered", "layer", "module", "path", "running", "scope")

    def __init__(self, layer: Layer | None = None, module: nn.Module | None = None) -> None:
        self.layer = layer
        self.scope = None if layer is None else layer.block()
        self.path = "" if layer is None else layer.path
        self.module: Callable[[], nn.Module | None] = nothing if module is None else weakref.ref(module)
        self.entered = False
        self.running = 0

    def __deepcopy__(self, _memo: dict[int, Any]) -> Ranged:
        return Ranged()

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"enter": nothing, "leave": nothing}

    def install(self, compiled: Compiled) -> Iterator[Any]:
        """Install the hooks; yields their handles.

        Inside compiled code, a module with hooks of the program gets none: the compiler guards on the number of its
        hooks, so another one would cause a recompilation.
        """
        module = self.module()
        if module is None:
            return
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        if module in compiled.inside and any(hooks):
            return
        for hookable in compiled.places(module):
            yield hookable.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
            yield hookable.register_forward_hook(self.leave, always_call=True)

    @uncompiled
    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Begin a call on this thread: open its range and, if gradients are enabled, follow it into the backward pass.

        Code compiled by torch.compile of PyTorch 2.4 omits ``kwargs``.
        """
        scope = self.scope
        if scope is None or _compiling():  # torch.compile traces the hook; this adds nothing to the graph
            return
        if self.running:
            self._close_interrupted(module)
        if scope.begin(args, kwargs or {}):
            self.entered = True
            self.running += 1

    @uncompiled
    def leave(self, _module: Any, _args: Any, outputs: Any) -> None:
        """End this thread's call and close ranges left open in it; ``outputs`` is None if the call raised."""
        scope = self.scope
        if scope is None or _compiling():
            return
        self.running -= 1
        scope.end(outputs)

    def _close_interrupted(self, module: Any) -> None:
        """Close ranges of earlier calls on this thread that no longer run.

        PyTorch does not run the hook after an exception that is not an Exception, such as KeyboardInterrupt.
        """
        backend = session.backend
        if backend is None:
            return
        running = -1  # without the call that is beginning
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            running += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
            frame = frame.f_back
        opened = backend.thread.position.owners.count(self.layer)
        for _ in range(opened - running):
            backend.close(self.layer)
        self.running = min(opened, running)


annotated: weakref.WeakKeyDictionary[nn.Module, Ranged] = weakref.WeakKeyDictionary()
"""Every module that is ranged by an annotation."""


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
        for wrapper in list(_wrappers):
            wrapped = getattr(wrapper, "_orig_mod", None)
            if wrapped in modules and not _exports(wrapper):
                self.regions.add(wrapped)
                call = getattr(wrapper.forward, "_torchdynamo_orig_callable", None)
                if getattr(call, "__self__", None) is not wrapped:  # else it compiles only the module's ``forward``
                    self._wrappers.setdefault(wrapped, []).append(wrapper)
        for module in modules:
            in_place = getattr(module, "_compiled_call_impl", None) is not None
            forward, is_off = module.forward, getattr(module.forward, "_torchdynamo_disable", False)
            if in_place or (hasattr(forward, "_torchdynamo_orig_callable") and not is_off):
                self.regions.add(module)
        for region in self.regions:
            wrapped = getattr(region, "_orig_mod", region)
            self.inside.update(inner for inner in wrapped.modules() if inner is not wrapped)

    def places(self, module: nn.Module) -> list[Any]:
        """What gets the hooks: the module itself, its wrappers, or its call if that is compiled with the hooks."""
        if module in self._wrappers:
            return list(self._wrappers[module])
        if module in self.inside:
            return [module]
        compiled: Any = module._compiled_call_impl
        compiled = compiled.compiled if type(compiled) is _HookedCall else compiled
        call = getattr(compiled, "_torchdynamo_orig_callable", None)
        runs_hooks = call is None or getattr(call, "__self__", None) is module  # in Python, around what is compiled
        return [module if runs_hooks else CompiledCall(module)]


class _HookedCall:
    """The compiled call of a module between hooks; PyTorch leaves it out of copies and pickles of the module."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.before: list[Callable[..., Any]] = []
        self.after: list[Callable[..., Any]] = []

    @uncompiled_itself
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:  # named like a module's, which `Ranged` looks for
        after = list(self.after)  # hooks are removed and installed again if this call is compiled now
        for hook in list(self.before):
            hook(self, args, kwargs)
        outputs = None
        try:
            outputs = self.compiled(*args, **kwargs)
            return outputs
        finally:
            for hook in after:
                hook(self, args, outputs)

    __call__ = _call_impl


class CompiledCall:
    """Takes hooks for a module that is compiled in place with its own hooks inside: they run around the compiled call.

    Args:
        module: The module; held weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def register_forward_pre_hook(self, hook: Callable[..., Any], **_options: bool) -> Handle:
        """As of a module; the hook comes first and gets the keyword arguments too."""
        return self._add(hook, "before")

    def register_forward_hook(self, hook: Callable[..., Any], **_options: bool) -> Handle:
        """As of a module; the hook is always called."""
        return self._add(hook, "after")

    def _add(self, hook: Callable[..., Any], when: str) -> Handle:
        module: Any = self._module()
        if type(module._compiled_call_impl) is not _HookedCall:
            module._compiled_call_impl = _HookedCall(module._compiled_call_impl)
        call = module._compiled_call_impl
        hooks = getattr(call, when)
        hooks.insert(0 if when == "before" else len(hooks), hook)

        def remove() -> None:
            if hook in hooks:
                hooks.remove(hook)
            owner: Any = self._module()
            if owner is not None and owner._compiled_call_impl is call and not call.before + call.after:
                owner._compiled_call_impl = call.compiled

        return Handle(remove)


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


def _exports(wrapper: Any) -> bool:
    """Whether torch.export made the wrapper to trace the module; PyTorch 2.4 keeps it for a while."""
    return bool(getattr(getattr(wrapper, "dynamo_ctx", None), "export", False))


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
        self._recomputes = Recomputes(self)
        self._patch = Patch(cls, name, lambda method: wrap(method, self._scope))

    def uninstall(self) -> None:
        """Restore the method, unless other code has replaced it since."""
        _methods.pop((self._cls, self._name), None)
        self._recomputes.remove()
        self._patch.remove()

    def _scope(self, module: nn.Module, *_args: Any, **_kwargs: Any) -> Any:
        if not self.every and module not in self.instances:
            return BARE
        ranged = annotated.get(module)
        if self._name != "forward":
            path = ranged.path if ranged else type(module).__name__
            return LayerScope(layer_of(f"{path}.{self._name}"))
        return _ForwardScope(ranged) if ranged else LayerScope(layer_of(type(module).__name__))


_methods: dict[tuple[type[nn.Module], str], _Method] = {}


class _ForwardScope:
    """The forward of an annotated module: uses the range that its hooks have just opened, else opens the same range."""

    def __init__(self, ranged: Ranged) -> None:
        self._ranged = ranged

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward with exactly one range."""
        backend = session.backend
        owners = backend.thread.position.owners if backend is not None else []
        if owners and owners[-1] is self._ranged.layer:
            return function(*args, **kwargs)
        outputs = None
        self._ranged.enter(None, args, kwargs)
        try:
            outputs = function(*args, **kwargs)
            return outputs
        finally:
            self._ranged.leave(None, None, outputs)
