"""Calls a function once a module is imported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


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
