"""Marks functions that torch.compile must not compile.

A program may compile a decorated function. Its forwarder then runs in Python and emits the range around the compiled
function. If the compiler traces a caller, it inlines the function without the forwarder.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_noted: list[tuple[Callable[..., Any], bool]] = []
"""Decorated functions, and whether torch.compile skips their callees too."""

_registered = False
"""Whether the compiler knows the decorated functions."""


def leave_to_python(function: Callable[..., Any], *, callees: bool = True) -> None:
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


def leave_ranges_to_python() -> None:
    """Make torch.compile skip all decorated functions, including functions decorated later."""
    global _registered  # noqa: PLW0603
    _registered = hasattr(sys.modules.get("torch"), "compiler")
    for function, callees in _noted:
        leave_to_python(function, callees=callees)


def _note(function: F, callees: bool) -> F:
    _noted.append((function, callees))
    if _registered:
        leave_to_python(function, callees=callees)
    return function
