"""Tells torch.compile which functions to leave to Python.

What is decorated may be what a program compiles. Its forwarder then runs as it is and ranges from outside what the
compiler makes of the function itself; where the compiler traces a caller, it looks through the forwarder instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_noted: list[tuple[Callable[..., Any], bool]] = []
"""What runs in Python where a range begins or ends, and whether what it calls is left to Python too."""

_told = False
"""Whether the compiler was told of them."""


def leave_to_python(function: Callable[..., Any], *, callees: bool = True) -> None:
    """Tell the compiler never to compile a function that Python calls, nor (with ``callees``) what that calls.

    Does nothing for what is no Python function, and while torch is not loaded.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None or not hasattr(sys.modules.get("torch"), "compiler"):
        return
    import torch._C._dynamo  # does not load the compiler

    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    else:
        eval_frame.skip_code(code)


def uncompiled(function: F) -> F:
    """Decorates what runs in Python where a range begins or ends: it is left to Python, and so is what it calls."""
    return _note(function, True)


def uncompiled_itself(function: F) -> F:
    """Decorates what calls the program inside a range: it is left to Python, what it calls is not."""
    return _note(function, False)


def leave_ranges_to_python() -> None:
    """Tell the compiler of all that is decorated so, now and from now on."""
    global _told  # noqa: PLW0603
    _told = hasattr(sys.modules.get("torch"), "compiler")
    for function, callees in _noted:
        leave_to_python(function, callees=callees)


def _note(function: F, callees: bool) -> F:
    _noted.append((function, callees))
    if _told:
        leave_to_python(function, callees=callees)
    return function
