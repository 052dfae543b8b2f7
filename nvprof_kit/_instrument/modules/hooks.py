"""Hooks before and after each call of a layer, and where they belong after torch.compile.

A module that is compiled in place, by its ``forward``, or by a wrapper runs its hooks in Python, outside the compiled
code, so its own hooks range it. Where PyTorch's own code has the outermost part of ``forward``, as in a class of
``torch.nn`` or below ``@torch.no_grad()``, the wrapper compiles the hooks too, and since PyTorch 2.15 so does
`nn.Module.compile`.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Hold, Shared, nothing
from nvprof_kit._instrument.ranges.layer import Layer, RangesCalls
from nvprof_kit._instrument.ranges.layer_range import LayerScope
from nvprof_kit._instrument.torch_compat import uncompiled, uncompiled_itself

_compiling = torch.compiler.is_dynamo_compiling


class Calls(RangesCalls):
    """The hooks of one layer. In a copied or pickled module they do nothing.

    Attributes:
        layer: The layer; None in a copy.
        scope: The ranges of the layer; None in a copy.
        entered: Whether the layer was ever called.
        running: Approximate number of running calls on all threads; too high after a call that ended without its hook.
    """

    __slots__ = ("entered", "layer", "running", "scope")

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self.scope = None if layer is None else LayerScope(layer)
        self.entered = False
        self.running = 0

    def __deepcopy__(self, _memo: dict[int, Any]) -> Calls:
        return Calls(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"enter": nothing, "leave": nothing}

    @uncompiled
    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Begin a call on this thread: open its range and, if gradients are enabled, follow it into the backward pass.

        Code compiled by torch.compile of PyTorch 2.4 omits ``kwargs``.
        """
        if _compiling():  # torch.compile traces the hook; this adds nothing to the graph
            return
        scope = self.scope
        if scope is None:
            return
        if self.running:
            self._close_interrupted(module)
        if scope.begin(args, kwargs or {}):
            self.entered = True
            self.running += 1

    @uncompiled
    def leave(self, _module: Any, _args: Any, outputs: Any) -> None:
        """End this thread's call and close ranges left open in it; ``outputs`` is None if the call raised."""
        if _compiling():
            return
        scope = self.scope
        if scope is not None:
            self.running -= 1
            scope.end(outputs)

    def _close_interrupted(self, module: Any) -> None:
        """Close ranges of earlier calls on this thread that no longer run.

        PyTorch does not run the hook after an exception that is not an Exception, such as KeyboardInterrupt.
        """
        backend = session.backend
        if backend is None:
            return
        running = _calls_running(module) - 1  # without the call that is beginning
        opened = backend.thread.position.owners.count(self.layer)
        for _ in range(opened - running):
            backend.close(self.layer)
        self.running = min(opened, running)


def _calls_running(module: nn.Module) -> int:
    """Number of running calls of a module on this thread."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


class Place(Protocol):
    """What takes hooks on calls: a module, or what stands for it where it is compiled."""

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call a hook before each call."""

    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = False) -> Any:
        """Call a hook after each call."""


annotated: weakref.WeakKeyDictionary[nn.Module, Ranged] = weakref.WeakKeyDictionary()
"""Every module that is ranged by an annotation."""


class Ranged:
    """A module to range.

    Args:
        path: Path of the module, the text of its ranges.
        module: The module; held weakly.
        calls: The hooks.

    Attributes:
        path: Path of the module.
        calls: The hooks.
        module: A weak reference to the module.
    """

    def __init__(self, path: str, module: nn.Module, calls: Calls) -> None:
        self.path = path
        self.calls = calls
        self.module = weakref.ref(module)

    def install(self, compiled: Compiled) -> Iterator[Any]:
        """Install the hooks; yields their handles.

        Inside compiled code, a module with hooks of the program gets none: the compiler guards on the number of its
        hooks, so another one would cause a recompilation.
        """
        module = self.module()
        if module is None or (module in compiled.inside and _has_hooks(module)):
            return
        for hookable in compiled.places(module):
            yield hookable.register_forward_pre_hook(self.calls.enter, prepend=True, with_kwargs=True)
            yield hookable.register_forward_hook(self.calls.leave, always_call=True)


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
                if not _runs_hooks(wrapper):
                    self._wrappers.setdefault(wrapped, []).append(wrapper)
        self.regions.update(module for module in modules if _is_compiled(module))
        for region in self.regions:
            wrapped = getattr(region, "_orig_mod", region)
            self.inside.update(inner for inner in wrapped.modules() if inner is not wrapped)

    def places(self, module: nn.Module) -> list[Place]:
        """What gets the hooks: the module itself, its wrappers, or its call if that is compiled with the hooks."""
        if module in self._wrappers:
            return list(self._wrappers[module])
        return [module if module in self.inside or _calls_hooks(module) else CompiledCall(module)]


class CompiledCall:
    """Takes hooks for a module that is compiled in place with its own hooks inside: they run around the compiled call.

    Args:
        module: The module; held weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> _CallHook:
        """As of a module."""
        return _CallHook(self._module, hook if with_kwargs else _without_kwargs(hook), "before", prepend)

    def register_forward_hook(self, hook: Callable[..., Any], *, always_call: bool = True) -> _CallHook:
        """As of a module, but the hook is always called."""
        return _CallHook(self._module, hook, "after", not always_call)


def _without_kwargs(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        hook(module, args)

    return call


class _HookedCall:
    """The compiled call of a module between hooks."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.before: list[Callable[..., Any]] = []
        self.after: list[Callable[..., Any]] = []

    @uncompiled_itself
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:  # named like a module's, which `Calls` looks for
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


class _CallHook:
    """A hook of a compiled call, until `remove`; PyTorch leaves the call out of copies and pickles of the module."""

    def __init__(
        self, module: weakref.ref[nn.Module], hook: Callable[..., Any], when: str, first: bool = False
    ) -> None:
        self._module = module
        self._hook = hook
        self._when = when
        owner: Any = module()
        if type(owner._compiled_call_impl) is not _HookedCall:
            owner._compiled_call_impl = _HookedCall(owner._compiled_call_impl)
        self._call: _HookedCall = owner._compiled_call_impl
        hooks = getattr(self._call, when)
        hooks.insert(0 if first else len(hooks), hook)

    def remove(self) -> None:
        """Remove the hook; the last one puts the compiled call back."""
        hooks = getattr(self._call, self._when)
        if self._hook in hooks:
            hooks.remove(self._hook)
        owner: Any = self._module()
        if owner is not None and owner._compiled_call_impl is self._call and not self._call.before + self._call.after:
            owner._compiled_call_impl = self._call.compiled


_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Known wrappers of `torch.compile`; modules have no reference to their wrappers."""


class _Registrations:
    """Tracks new wrappers with PyTorch's hook for the registration of submodules."""

    def __init__(self) -> None:
        self._hook: Any = None
        self.shared = Shared(self._install, self._undo)

    def _install(self) -> None:
        if self._hook is None:
            self._note_earlier()
            self._hook = register_module_module_registration_hook(_note)

    def _undo(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    @staticmethod
    def _note_earlier() -> None:
        """Find earlier wrappers by their class, once."""
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is not None:
            wrapper = compiler.OptimizedModule
            _wrappers.update(referrer for referrer in gc.get_referrers(wrapper) if type(referrer) is wrapper)


def _note(wrapper: nn.Module, name: str, _module: nn.Module | None) -> None:
    if name == "_orig_mod":
        _wrappers.add(wrapper)


_registrations = _Registrations()


def note_wrappers(user: object) -> Hold:
    """Track the wrappers that `torch.compile` creates, for `Compiled`, while a user needs them.

    Args:
        user: The object that needs them; held weakly.
    """
    return _registrations.shared.hold(user)


def _exports(wrapper: Any) -> bool:
    """Whether torch.export made the wrapper to trace the module; PyTorch 2.4 keeps it for a while."""
    return bool(getattr(getattr(wrapper, "dynamo_ctx", None), "export", False))


def _runs_hooks(wrapper: Any) -> bool:
    """Whether a wrapper calls its module in Python and compiles only the module's ``forward``."""
    call = getattr(wrapper.forward, "_torchdynamo_orig_callable", None)
    return getattr(call, "__self__", None) is wrapper._orig_mod


def _calls_hooks(module: Any) -> bool:
    """Whether a module's own hooks run in Python if it is called."""
    compiled = module._compiled_call_impl
    call = getattr(compiled.compiled if type(compiled) is _HookedCall else compiled, "_torchdynamo_orig_callable", None)
    return call is None or getattr(call, "__self__", None) is module


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def _is_compiled(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    forward = module.forward
    by_forward = hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)
    return in_place or by_forward
