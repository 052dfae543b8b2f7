"""Run code once a module is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from nvprof_kit.integrations._host.guard import warn


def after_import(name: str, then: Callable[[Any], object]) -> None:
    """Call a function with a module: now if it is imported, else once when it is. Exceptions become a warning."""
    module = sys.modules.get(name)
    if module is not None:
        _call(then, module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[Any], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Let the other finders find the module, and call the function after the loader has executed it."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                _call(self._then, module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _call(then: Callable[[Any], object], module: Any) -> None:
    try:
        then(module)
    except Exception as error:  # the program's import must not fail
        warn(f"{module.__name__} is not ranged ({type(error).__name__}: {error})")
