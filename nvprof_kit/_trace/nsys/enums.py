"""Enumerations of an nsys export: whether its numbers mean what this package takes them for.

An export names the values of its enumerations in tables ``ENUM_...``. The readers use the numbers, which have been the
same in all known releases; a release that numbers them otherwise is refused, not misread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from nvprof_kit._trace.files.database import Database


class Enumeration(NamedTuple):
    """The values of an enumeration by number.

    Attributes:
        table: Its table in an export.
        names: The names of its values.
    """

    table: str
    names: Mapping[int, str]


def _numbered(table: str, prefix: str, names: Mapping[int, str]) -> Enumeration:
    return Enumeration(table, MappingProxyType({number: f"{prefix}{name}" for number, name in names.items()}))


EVENT_TYPES = _numbered(
    "ENUM_NSYS_EVENT_TYPE",
    "Nvtx",
    {33: "Category", 34: "Mark", 59: "PushPopRange", 60: "StartEndRange", 70: "tPushPopRange", 71: "tStartEndRange"}
    | {75: "DomainCreate"},
)
"""`NVTX_EVENTS.eventType`, the values that are read."""

_OTHER_EVENT_TYPES = frozenset({32, *range(35, 40), *range(64, 70), *range(72, 75), 76, 97, 98})

COPY_KINDS = _numbered(
    "ENUM_CUDA_MEMCPY_OPER",
    "CUDA_MEMCPY_KIND_",
    {1: "HTOD", 2: "DTOH", 3: "HTOA", 4: "ATOH", 5: "ATOA", 6: "ATOD", 7: "DTOA", 8: "DTOD", 9: "HTOH", 10: "PTOP"}
    | {11: "UVM_HTOD", 12: "UVM_DTOH", 13: "UVM_DTOD"},
)
"""`CUPTI_ACTIVITY_KIND_MEMCPY.copyKind`."""

MEMORY_KINDS = _numbered(
    "ENUM_CUDA_MEM_KIND",
    "CUDA_MEMOPR_MEMORY_KIND_",
    {0: "PAGEABLE", 1: "PINNED", 2: "DEVICE", 3: "ARRAY", 4: "MANAGED", 5: "DEVICE_STATIC", 6: "MANAGED_STATIC"}
    | {7: "UNKNOWN"},
)
"""``srcKind`` and ``dstKind`` of copies, ``memKind`` of allocations."""

MEMORY_OPERATIONS = _numbered(
    "ENUM_CUDA_DEV_MEM_EVENT_OPER", "CUDA_DEV_MEM_EVENT_OPR_", {0: "ALLOCATION", 1: "DEALLOCATION"}
)
"""`CUDA_GPU_MEMORY_USAGE_EVENTS.memoryOperationType`."""

SEVERITIES = Enumeration("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", MappingProxyType({2: "Warning", 3: "Error"}))
"""`DIAGNOSTIC_EVENT.severity`, the values that are read."""

ALL = (EVENT_TYPES, COPY_KINDS, MEMORY_KINDS, MEMORY_OPERATIONS, SEVERITIES)


def check_enums(db: Database, enumerations: Iterable[Enumeration] = ALL) -> None:
    """Check that an export's enumerations number their values as known. A value that merely has a new name causes a
    warning.

    Raises:
        CaptureError: A known value has another number.
    """
    for enumeration in enumerations:
        names = _names_in(db, enumeration)
        numbers = {name: number for number, name in names.items()}
        for number, name in enumeration.names.items():
            if names.get(number, name) == name:
                continue
            if name in numbers:
                raise db.refuse(f"{enumeration.table} numbers {name} as {numbers[name]}, where {number} was expected")
            db.warn(f"{enumeration.table} calls {number} {names[number]!r}; it is read as {name}")


def defined(db: Database, enumeration: Enumeration) -> set[int]:
    """The numbers that have a meaning: the known ones, and those that the export names itself."""
    more = _OTHER_EVENT_TYPES if enumeration is EVENT_TYPES else ()
    return {*enumeration.names, *more, *_names_in(db, enumeration)}


def _names_in(db: Database, enumeration: Enumeration) -> dict[int, str]:
    """The names in the export by number; empty if it does not name them."""
    if not db.has(enumeration.table, "id", "name"):
        return {}
    rows = db.rows(enumeration.table, ("id", "name"))
    return {number: str(name) for number, name in rows if isinstance(number, int)}
