"""A cell of a notebook that is run again."""

from __future__ import annotations

import builtins
from typing import Any

from nvprof_kit._instrument.modules.annotation import Annotation
from nvprof_kit._instrument.ranges import state


def replace_in_notebook(owner: Any) -> None:
    """Take an earlier annotation of the same object back, in IPython alone.

    There the same cell is run again and again, perhaps with other options, and the last one counts. A program that
    annotates twice has two places that each believe that the ranges are theirs, and is told so.
    """
    earlier = state.annotated.get(owner)
    if isinstance(earlier, Annotation) and hasattr(builtins, "__IPYTHON__"):
        earlier.remove()
