"""Temporary patches of PyTorch and other libraries, and what torch.compile must not compile.

Importing the package changes nothing. Each patch of PyTorch is in a `Patches`: installed for its first user and
removed after its last. A user holds it with `Patches.hold`.

A program may compile a decorated function. Its forwarder then runs in Python and emits the range around the compiled
function. If the compiler traces a caller, it inlines the function without the forwarder.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, cast


class AfterImport(MetaPathFinder):
    """Put it first in ``sys.meta_path``: it calls a function with a module after its import, once, and removes itself.

    A program that only asks whether the module is there (``importlib.util.find_spec``) changes nothing.

    Args:
        name: Full name of the module.
        then: The function; what it raises, the program's import raises.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then
        self._looking = threading.local()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Let the other finders find the module, and call the function after the loader has executed it."""
        if fullname != self._name or self not in sys.meta_path or getattr(self._looking, "now", False):
            return None
        self._looking.now = True
        try:
            spec = find_spec(fullname)
        finally:
            self._looking.now = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


F = TypeVar("F", bound=Callable[..., Any])

_noted: list[tuple[Callable[..., Any], bool]] = []
"""Decorated functions, and whether torch.compile skips their callees too."""

_follows = False
"""Whether the compiler is, or is to be, followed."""


def skip_compiling(function: Callable[..., Any], *, callees: bool = True) -> None:
    """Make torch.compile skip a function called from Python and, with ``callees``, everything that it calls.

    Does nothing if the object is not a Python function, or if torch is not loaded.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None or not hasattr(sys.modules.get("torch"), "compiler"):
        return
    import torch._C._dynamo  # does not import the compiler

    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    else:
        eval_frame.skip_code(code)


def uncompiled(function: F) -> F:
    """Decorator: torch.compile skips the function and its callees. For functions that open or close ranges."""
    return _note(function, True)


def uncompiled_itself(function: F) -> F:
    """Decorator: torch.compile skips the function, not its callees. For functions that call the program in a range."""
    return _note(function, False)


def follow_compiler() -> None:
    """Make torch.compile skip all decorated functions, including functions decorated later, and follow its tracing."""
    global _follows  # noqa: PLW0603
    dynamo = sys.modules.get("torch._dynamo")
    if hasattr(dynamo, "callback_handler"):  # not while it is being imported, when a garbage collection may come here
        _prepare(dynamo)
    elif not _follows:
        sys.meta_path.insert(0, AfterImport("torch._dynamo", _prepare))
    _follows = True
    for function, callees in _noted:
        skip_compiling(function, callees=callees)


def unseen(function: F) -> F:
    """Decorator: the compiler of PyTorch before 2.7 also skips what the function calls in Python's library.

    For functions that are called rarely; newer PyTorch skips the callees of what calls them.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        import torch._C._dynamo

        eval_frame: Any = torch._C._dynamo.eval_frame
        if hasattr(eval_frame, "set_code_exec_strategy"):
            return function(*args, **kwargs)
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    return cast(F, called)


def _prepare(dynamo: Any) -> None:
    """Follow the compiler's tracing for `Untraced`, and make that of PyTorch before 2.7 skip this package's code."""
    import torch._C._dynamo

    if _untraced:
        for callbacks, callback in _callbacks(dynamo.callback_handler):
            if callback not in callbacks:
                callbacks.append(callback)
        if not _clear:  # `torch._dynamo.reset` clears all callbacks
            _clear.append(Patch(type(dynamo.callback_handler), "clear", around(nothing, follow_compiler)))
    if not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"):
        _skip_package()


@functools.cache
def _skip_package() -> None:
    """Once, as each call adds a pattern: this compiler cannot skip the callees of a function."""
    rules = import_module("torch._dynamo.trace_rules")
    if hasattr(rules, "add"):
        rules.add("nvprof_kit._instrument")


def _note(function: F, callees: bool) -> F:
    _noted.append((function, callees))
    if _follows:
        skip_compiling(function, callees=callees)
    return function


_MISSING = object()


class Patch:
    """An attribute that is replaced until `remove`.

    If other code has replaced it again in the meantime, `remove` keeps that replacement; ours then calls the original.

    Args:
        target: The module, class or object that has the attribute.
        name: The attribute.
        make: Makes the replacement from the original, as looked up on the target.
    """

    def __init__(self, target: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self._target = target
        self._name = name
        self._own = vars(target).get(name, _MISSING)
        original = getattr(target, name)
        self._new = make(original)
        if isinstance(original, MethodType) and original.__self__ is target and not isinstance(target, type):
            self._new = MethodType(_of_this_alone(target, original, self._new), target)
        setattr(target, name, self._new)

    def remove(self) -> None:
        """Put the original back."""
        if vars(self._target).get(self._name) is not self._new:
            return
        if self._own is _MISSING:
            delattr(self._target, self._name)
        else:
            setattr(self._target, self._name, self._own)


def _of_this_alone(target: Any, original: MethodType, new: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on one object. On a copy of the object, the replacement calls the original; a pickle loads with
    the method of the class.
    """
    itself = weakref.ref(target)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is itself():
            return new(*args, **kwargs)
        return original.__func__(self, *args, **kwargs)

    skip_compiling(method, callees=False)
    return method


nothing = nullcontext().__exit__
"""Accepts any arguments without names, does nothing, and can be pickled without this package."""


def instead(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a replacement for a `Patch` that calls a function with the original and the call's arguments."""
    skip_compiling(function, callees=False)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        skip_compiling(replacement, callees=False)
        return replacement

    return make


def around(before: Callable[[], object], after: Callable[[], object]) -> Callable[[Callable[..., Any]], Any]:
    """Make a replacement for a `Patch` that calls functions before and after the original, also if it raises."""

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return original(*args, **kwargs)
        finally:
            after()

    return instead(call)


def before(first: Callable[..., object]) -> Callable[[Callable[..., Any]], Any]:
    """Make a replacement for a `Patch` that calls a function with the original's arguments, and then the original."""

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    return instead(call)


class Stack(threading.local):
    """A stack of each thread's own."""

    def __init__(self) -> None:
        self.items: list[Any] = []


class Removable(Protocol):
    """A change that can be removed, such as the handle of a PyTorch hook."""

    def remove(self) -> None:
        """Remove it; a second call does nothing."""


class Handle(NamedTuple):
    """A removable change, of the function that removes it."""

    remove: Callable[[], None]


class Patches:
    """Patches, or handles of other changes, made together for the first user and removed after the last.

    Args:
        make: Makes the patches. If it raises, it must leave none installed.
    """

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make
        self._patches: list[Any] = []
        self._count = 0
        self._lock = threading.RLock()  # reentrant: a garbage collection may end one user while another is added

    def hold(self, user: object) -> Handle:
        """Patch for one user: until the result is removed or the user, which is held weakly, is garbage-collected."""
        with self._lock:
            self._count += 1
            try:
                if not self._patches:
                    self._patches = self._make()
            except BaseException:
                self._release()
                raise
            release = weakref.finalize(user, self._release)
            release.atexit = False
            return Handle(release)

    def _release(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                patches, self._patches = self._patches, []
                for patch in reversed(patches):
                    patch.remove()


class Untraced:
    """Hooks that are removed while torch.compile traces, and then installed again.

    A traced hook adds nothing to the graph except guards. These guards would compile every layer separately, and
    recompile all layers when the hooks are removed. Compiled code does not check for hooks, and code that runs in
    Python calls them. Dynamo would also compile the hooks themselves, to empty graphs, so they are marked as skipped.

    Args:
        install: Installs the hooks, now and after each tracing; returns the handle of each. More modules may be
            compiled by then, so their places may differ.
    """

    def __init__(self, install: Callable[[], Iterable[Removable]]) -> None:
        self._install = install
        self._hooks: list[Removable] = []
        _untraced[self] = None
        follow_compiler()
        self._resume()

    def _resume(self) -> None:
        try:
            for hook in self._install():
                self._hooks.append(hook)
        except BaseException:
            self.remove()
            raise

    def _pause(self) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def remove(self) -> None:
        """Remove the hooks for good; a second call does nothing."""
        _untraced.pop(self, None)
        self._pause()
        handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if handler is not None and not _untraced:
            while _clear:
                _clear.pop().remove()
            for callbacks, callback in _callbacks(handler):
                if callback in callbacks:
                    callbacks.remove(callback)


_untraced: dict[Untraced, None] = {}
"""Those with hooks, in the order in which they are installed."""

_clear: list[Patch] = []
"""The patch of what clears the callbacks, while there are hooks."""


def _begin_tracing(*arguments: Any) -> None:
    if arguments and getattr(getattr(arguments[0], "callback_trigger", None), "name", "DYNAMO") != "DYNAMO":
        return
    for hooks in reversed(list(_untraced)):
        hooks._pause()


def _end_tracing(*_arguments: Any) -> None:
    for hooks in list(_untraced):
        if not hooks._hooks:
            try:
                hooks._resume()
            except Exception as error:  # the compilation must not fail
                warn(f"ranges end at a compilation ({type(error).__name__}: {error})")


def _callbacks(handler: Any) -> list[tuple[list[Any], Callable[..., None]]]:
    return [(handler.start_callbacks, _begin_tracing), (handler.end_callbacks, _end_tracing)]


class Guarded:
    """Base class of objects that a framework calls: after the first exception inside, they do nothing.

    Attributes:
        broken: Whether an exception has occurred.
    """

    broken = False

    def give_up(self, error: Exception) -> None:
        """Warn once and remove what is installed."""
        if self.broken:
            return
        self.broken = True
        warn(f"{type(self).__name__} stops, the run continues without its ranges ({type(error).__name__}: {error})")
        try:
            self.undo()
        except Exception:  # the warning is out; the run must not fail
            return

    def undo(self) -> None:
        """Remove what is installed."""


def never_fails(method: F) -> F:
    """Decorate a method of a `Guarded`: it does not raise, and returns None if it fails."""

    @functools.wraps(method)
    def guarded(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    return cast(F, guarded)


def warn(text: str) -> None:
    """Emit a warning with the package's name."""
    warnings.warn(f"nvprof_kit: {text}", stacklevel=4)


def after_import(name: str, then: Callable[[Any], object]) -> None:
    """Call a function with a module: now if it is imported, else once when it is. Exceptions become a warning."""

    def call(module: Any) -> None:
        try:
            then(module)
        except Exception as error:  # the program's import must not fail
            warn(f"{module.__name__} is not ranged ({type(error).__name__}: {error})")

    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, call))
