"""The events of a Kineto trace, sorted by what they are and checked for what each must have. Times are microseconds
with three decimals in the file, and whole nanoseconds here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.checks import check_spans, whole_ns
from nvprof_kit._trace.schema import KINETO_SOURCES
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN

Int64Array = npt.NDArray[np.int64]

GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of what ran on the GPU, and the kind of operation each is."""

_ANNOTATION, _OPERATOR, _PYTHON, _ARROW = "user_annotation", "cpu_op", "python_function", "fwdbwd"
_CALLS = ("cuda_runtime", "cuda_driver")
_OLDER = {"operator": _OPERATOR, "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_OURS = f"{DOMAIN}:"
_MODULE = "nn.Module: "
_NO_ARGS: Mapping[str, Any] = MappingProxyType({})
_ARGS = frozenset(
    {"device", "stream", "correlation", "bytes", "graph node id", "Sequence number", "Fwd thread id"}
    | {"In msg nelems", "Out msg nelems", "dtype", "Group size", "Collective name", "Seq"}
    | {"Process Group Name", "Process Group Description", "Process Group Ranks"}
)
_HALF_LETTER = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_ESSENTIAL = ("args.correlation", "args.device")
"""Arguments without which no operation of a category could be told from another."""


class Event(NamedTuple):
    """One complete event: times in microseconds, and those of its arguments that are read."""

    name: str
    ts: float
    dur: float
    tid: int
    args: Mapping[str, Any]


class Arrow(NamedTuple):
    """One end of an arrow from forward to backward."""

    begins: bool
    id: object
    ts: float
    tid: int


class Events:
    """The complete ("X") events of a trace by category, and its arrows from forward to backward.

    Attributes:
        by_category: The events of each category that is read.
        arrows: The ends of the arrows.
        process: The process that was traced; None where no event tells it.
        warnings: Sentences on what events lack.
    """

    def __init__(self) -> None:
        self.by_category: dict[str, list[Event]] = {}
        self.arrows: list[Arrow] = []
        self.process: int | None = None
        self.warnings: list[str] = []
        self._missing: Counter[tuple[str, str]] = Counter()
        self._names: dict[str, str] = {}

    @classmethod
    def of(cls, events: Iterable[Any], named: Path = Path("trace")) -> Events:
        """Sort the events of a trace. Older versions wrote the categories with capitals; our ranges come as operators,
        which costs the recorder least, and count as annotations.

        Raises:
            CaptureError: Events lack what they must have; the message names category and key.
        """
        self = cls()
        pids: dict[str, Any] = {}
        for event in events:
            if not isinstance(event, dict):
                continue
            category = str(event.get("cat", "")).lower()
            category = _OLDER.get(category, category)
            if event.get("ph") == "X":
                if category in KINETO_SOURCES:
                    pids.setdefault(category, event.get("pid"))
                    self._add(category, event)
                elif "cat" not in event or event["cat"] is None or not isinstance(event["cat"], str):
                    self._missing["", "cat"] += 1
            elif category == _ARROW:
                self.arrows.append(_arrow(event))
            elif "dur" in event and category in KINETO_SOURCES:
                self._missing[category, "ph"] += 1
        self._check(named)
        known = [pids[one] for one in (*_CALLS, _OPERATOR, _ANNOTATION) if one in pids]
        self.process = (number(known[0]) or 0) if known else None
        return self

    def _add(self, category: str, event: dict[str, Any]) -> None:
        """Keep an event, or count what it lacks."""
        name, args = event.get("name"), event.get("args")
        if not isinstance(name, str):
            self._missing[category, "name"] += 1
            name = ""
        if args is not None and not isinstance(args, dict):
            self._missing[category, "args"] += 1
            args = None
        ours = name.startswith(_OURS)
        if category == _PYTHON and not name.startswith(_MODULE) and name:
            return  # only modules are read of the Python functions
        start, length, tid = (_float(event.get("ts")), _float(event.get("dur")), number(event.get("tid")))
        for key, value in (("ts", start), ("dur", length), ("tid", tid)):
            if value is None and key in KINETO_SOURCES[category]:
                self._missing[category, key] += 1
        kept = _kept(args, self._missing, category)
        told = self._names.setdefault(name, name) if name.isascii() else _HALF_LETTER.sub("\ufffd", name)
        self.by_category.setdefault(_ANNOTATION if ours else category, []).append(
            Event(told, start or 0.0, length or 0.0, tid or 0, kept)
        )

    def _check(self, named: Path) -> None:
        """Refuse a trace whose events lack what no trace lacks, and note what some of them lack."""
        for category, found in self.by_category.items():
            for key in KINETO_SOURCES[category]:
                _, _, tail = key.partition(".")
                if tail:
                    lacking = sum(number(event.args.get(tail)) is None for event in found)
                    self._lacking(named, category, key, lacking, len(found))
        for (category, key), lacking in self._missing.items():
            if key in ("args", "ph", "cat"):
                what = f"{lacking} {category or 'complete'} events have no {key} that can be read"
                if key == "ph" or (key == "cat" and not self.by_category):
                    raise CaptureError(f"{named}: {what}; the trace is damaged: record it again")
                self.warnings.append(f"{what}: they are left out, or what it says is")
                continue
            raise CaptureError(
                f"{named}: {lacking} {category} events have no {key}, or none that can be read; the trace is damaged: "
                "record it again"
            )

    def _lacking(self, named: Path, category: str, key: str, lacking: int, count: int) -> None:
        if lacking == count and key in _ESSENTIAL:
            raise CaptureError(f"{named}: no {category} event has {key}, or one that is a number; record it again")
        if lacking:
            self.warnings.append(f"{lacking} of {count} {category} events have no {key}, or none that is a number")

    @property
    def gpu(self) -> list[tuple[str, list[Event]]]:
        """What ran on the GPU: kind of operation and events."""
        return [(kind, self.by_category.get(category, [])) for category, kind in GPU_CATEGORIES.items()]

    @property
    def calls(self) -> list[Event]:
        """Calls of the CUDA runtime and driver."""
        return [event for category in _CALLS for event in self.by_category.get(category, [])]

    @property
    def operators(self) -> list[Event]:
        """Operators on the CPU, our ranges not among them."""
        return self.by_category.get(_OPERATOR, [])

    @property
    def annotations(self) -> list[Event]:
        """What the program annotated, our ranges among it."""
        return self.by_category.get(_ANNOTATION, [])

    @property
    def python(self) -> list[Event]:
        """Calls of modules, in a trace with stacks."""
        return self.by_category.get(_PYTHON, [])


def _kept(args: Any, missing: Counter[tuple[str, str]], category: str) -> Mapping[str, Any]:
    """The arguments that are read."""
    if not args:
        return _NO_ARGS
    kept = {key: args[key] for key in args.keys() & _ARGS}
    for key in ("Sequence number", "Fwd thread id"):
        if key in kept and number(kept[key]) is None:
            missing[category, f"args.{key}"] += 1
    return kept or _NO_ARGS


def _arrow(event: dict[str, Any]) -> Arrow:
    id_ = event.get("id")
    return Arrow(
        event.get("ph") == "s",
        id_ if isinstance(id_, (int, str)) else None,
        _float(event.get("ts")) or 0.0,
        number(event.get("tid")) or 0,
    )


def _float(value: Any) -> float | None:
    """A time of the file, which may be a text; None for what is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else None
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def number(value: Any) -> int | None:
    """A whole number that the file may hold as a text, None for what is none. Ids are unsigned in the file: those from
    2**63 on are negative here, as in an nsys export.
    """
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        return None
    return value - 2**64 if value >= 2**63 else value


def numbers(events: list[Event], name: str, missing: int = -1) -> Int64Array:
    """One of the arguments of the events."""
    return _column(events, lambda event: number(event.args.get(name)), missing)


def _column(events: list[Event], value: Callable[[Event], int | None], missing: int) -> Int64Array:
    found = (value(event) for event in events)
    return np.fromiter((missing if one is None else one for one in found), np.int64, len(events))


def threads(events: list[Event]) -> Int64Array:
    """The threads of the events."""
    return np.fromiter((event.tid for event in events), np.int64, len(events))


def times(events: list[Event], named: Path = Path("trace")) -> tuple[Int64Array, Int64Array]:
    """Start and end of the events in ns.

    Raises:
        CaptureError: An event has no time, or ends before it begins.
    """
    start = whole_ns(named, "ts", np.fromiter((event.ts for event in events), np.float64, len(events)))
    length = whole_ns(named, "dur", np.fromiter((event.dur for event in events), np.float64, len(events)))
    end = start + length
    check_spans(named, "events (ts + dur)", start, end)
    return start, end
