"""Notebook cells that are rerun."""

from __future__ import annotations

import builtins
from typing import Any

from nvprof_kit._instrument.modules.annotation import Annotation
from nvprof_kit._instrument.ranges import state


def replace_in_notebook(owner: Any) -> None:
    """Remove an earlier annotation of the same object, in IPython only.

    In a notebook, a cell is rerun, possibly with other options, and the last run applies. In a program, a second
    annotation is an error, because two places would each rely on their own ranges.
    """
    earlier = state.annotated.get(owner)
    if isinstance(earlier, Annotation) and hasattr(builtins, "__IPYTHON__"):
        earlier.remove()
