"""Which layer of a transformer costs what, from Nsight's own data.

`open` opens a capture to ask it; `annotate_model`, `layer_range`, `step` and others put the layers into one. What there
is stands in ``__init__.pyi``. A name is loaded when it is first used: importing the package starts nothing and loads
neither torch nor pandas.
"""

import importlib
import re
from pathlib import Path

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
