"""The lane of this run: the usual one, or the full one with NVPROF_KIT_FULL=1."""

import os

FULL = os.environ.get("NVPROF_KIT_FULL") == "1"
"""Run the tests marked ``full`` too, every test of nsys with every release, and many random cases."""


def examples(usual: int) -> int:
    """Number of random cases of a property test: ten times as many in the full lane."""
    return 10 * usual if FULL else usual
