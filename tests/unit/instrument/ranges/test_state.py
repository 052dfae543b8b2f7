"""Whether ranges are emitted, and what importing the package costs: each in a process of its own."""

import os
import subprocess
import sys

import pytest


def python(program: str, **environ: str) -> str:
    """What a program prints."""
    clean = {name: value for name, value in os.environ.items() if "NVTX" not in name and name != "NVPROF_KIT"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).strip()


BACKEND = "from nvprof_kit._instrument import session; print(type(session.backend).__name__)"


@pytest.mark.parametrize(
    ("environ", "backend"),
    [
        ({}, "NoneType"),
        ({"NVPROF_KIT": ""}, "NoneType"),
        ({"NVTX_INJECTION64_PATH": "/nowhere/lib.so"}, "Nvtx"),
        ({"NSYS_PROFILING_SESSION_ID": "1"}, "NoneType"),  # nsys without -t nvtx
        ({"NVPROF_KIT": "ON"}, "Nvtx"),
        ({"NVPROF_KIT": "off", "NVTX_INJECTION64_PATH": "/nowhere/lib.so"}, "NoneType"),
    ],
)
def test_the_environment_decides(environ, backend):
    assert python(BACKEND, **environ) == backend


def test_a_bad_value_warns_once():
    said = python(BACKEND, NVPROF_KIT="yes")
    assert "NVPROF_KIT='yes' is not one of auto, on, off; using auto" in said
    assert "NoneType" in said


def test_ranges_without_torch():
    program = """
import sys
from nvprof_kit import layer_range, mark, phase, step
@layer_range
def f():
    with phase("x"), layer_range("y"), step(3): mark("z")
f()
layer_range.end(layer_range.start("w"))
assert "torch" not in sys.modules
"""
    assert python(program, NVPROF_KIT="on") == ""


RECORDED = """
import gc
from nvtx._lib import lib
gc.disable()
seen = []
lib.push_range = lambda attributes, _handle: seen.append(getattr(attributes.message, "string", attributes.message))
lib.pop_range = lambda _handle: seen.append("end")
from nvprof_kit import phase
class Dies:
    def __del__(self):
        with phase("finalizer"): pass
"""

COLLECTIONS = {
    "with phase('backward'): gc.collect(0); gc.collect()": ["backward", "gc", "end", "end"],
    "with phase('backward'): one = Dies(); one.itself = one; del one; gc.collect()": [
        *("backward", "gc", "finalizer", "end", "end", "end")
    ],
    # as Python ends it collects once more, which is no range
    "with phase('backward'): pass\ngc.enable(); lib.push_range = lambda *_: print('late')": ["backward", "end"],
}


@pytest.mark.parametrize("program", COLLECTIONS)
def test_a_full_collection_is_a_range_in_order_with_all_others(program):
    assert python(f"{RECORDED}\n{program}\nprint(seen)", NVPROF_KIT="on") == str(COLLECTIONS[program])
