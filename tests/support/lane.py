"""Which lane the suite runs in: the usual one, or with NVPROF_KIT_FULL=1 the full one, which takes its time."""

from __future__ import annotations

import os

FULL = os.environ.get("NVPROF_KIT_FULL") == "1"
"""Run the tests marked ``full`` too, every test of nsys with every release, and many random cases."""


def examples(usual: int) -> int:
    """How many random cases a property is tried with: ten times as many in the full lane."""
    return 10 * usual if FULL else usual
