"""Ranges around full garbage collections: only while a tool listens, in order with all other ranges."""

from __future__ import annotations

from unit.instrument.ranges.test_state import python

RECORDED = """
import gc
from nvtx._lib import lib
gc.disable()
seen = []
lib.push_range = lambda attributes, _handle: seen.append(attributes.message)
lib.pop_range = lambda _handle: seen.append("end")
"""


def test_a_full_collection_is_a_range_inside_what_is_open() -> None:
    program = (
        RECORDED
        + """
from nvprof_kit import phase
with phase("backward"):
    gc.collect(0)
    gc.collect()
print([getattr(one, "string", one) for one in seen])
"""
    )
    assert python(program, NVPROF_KIT="on") == "['backward', 'gc', 'end', 'end']"


def test_what_ranges_inside_a_collection_leaves_the_order_as_it_was() -> None:
    program = (
        RECORDED
        + """
from nvprof_kit import phase
class Dies:
    def __del__(self):
        with phase("finalizer"): pass
with phase("backward"):
    one = Dies(); one.itself = one; del one
    gc.collect()
print([getattr(one, "string", one) for one in seen])
"""
    )
    expected = "['backward', 'gc', 'finalizer', 'end', 'end', 'end']"
    assert python(program, NVPROF_KIT="on") == expected


def test_the_collection_as_python_ends_is_no_range() -> None:
    program = """
import sys
from nvtx._lib import lib
lib.push_range = lambda attributes, _handle: print(getattr(attributes.message, "string", attributes.message))
lib.pop_range = lambda _handle: None
from nvprof_kit import phase
import gc
gc.disable()
with phase("backward"):
    pass
gc.enable()
"""
    assert python(program, NVPROF_KIT="on") == "backward"
