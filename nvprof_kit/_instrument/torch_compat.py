"""Where PyTorch's releases differ, and what has to wait for its import.

Marks functions that torch.compile must not compile. A program may compile a decorated function. Its forwarder then runs
in Python and emits the range around the compiled function. If the compiler traces a caller, it inlines the function
without the forwarder.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar, cast


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

_registered = False
"""Whether the compiler knows the decorated functions."""


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


def skip_compiling_ranges() -> None:
    """Make torch.compile skip all decorated functions, including functions decorated later."""
    global _registered  # noqa: PLW0603
    if not _registered and "torch._dynamo" in sys.modules:
        _skip_files(sys.modules["torch._dynamo"])
    elif not _registered:
        sys.meta_path.insert(0, AfterImport("torch._dynamo", _skip_files))
    _registered = hasattr(sys.modules.get("torch"), "compiler")
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


def _skip_files(dynamo: Any) -> None:
    """Make the compiler of PyTorch before 2.7 skip this package's code, as it cannot skip the callees of a function."""
    import torch._C._dynamo

    if hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"):
        return
    rules = import_module(f"{dynamo.__name__}.trace_rules")
    if hasattr(rules, "add"):
        rules.add("nvprof_kit._instrument")


def _note(function: F, callees: bool) -> F:
    _noted.append((function, callees))
    if _registered:
        skip_compiling(function, callees=callees)
    return function
