"""Memory that a mapping process frees is used again, without asking the system for its pages each time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvprof_kit._trace.files.own_process import switch_threads_often

FAULTS = """
import resource, sys
import numpy as np
from nvprof_kit._trace.files.own_process import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def turn():
    return [np.ones(1 << 18) for _ in range(8)]  # 2 MB each, in pages of 4 kB: 4096 of them
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_used_again() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("a setting of glibc")
    least, usual = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True).stdout)
        for how in ("keep", "leave")
    )
    if usual < 20_000:
        pytest.skip("this C library keeps freed memory by itself")
    assert least < usual / 10


def test_threads_of_a_map_wait_less_for_the_interpreter() -> None:
    before = sys.getswitchinterval()
    try:
        switch_threads_often()
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(before)
