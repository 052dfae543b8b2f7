"""The events of a Kineto trace as columns, sorted by what they are and checked for what each must have. Times are
microseconds with three decimals in the file, and whole nanoseconds here.

No event is kept as an object: a trace has millions, and a column of them takes eight bytes each.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.files.checks import check_spans, whole_ns
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.kineto.stream import UNREADABLE, Args, Row
from nvprof_kit._trace.schema import KINETO_SOURCES
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN

Int64Array = npt.NDArray[np.int64]

GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of what ran on the GPU, and the kind of operation each is."""

CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
"""Categories of the calls of CUDA."""

MISSING = int(np.iinfo(np.int64).min)
"""Stands for an argument that an event does not have."""

_ANNOTATION, _OPERATOR, _PYTHON, _ARROW = "user_annotation", "cpu_op", "python_function", "fwdbwd"
_OLDER = {"operator": _OPERATOR, "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_OURS = f"{DOMAIN}:"
_MODULE, _COLLECTION = "nn.Module: ", "Python GC"
_HALF_LETTER = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_ON_GPU = ("device", "stream", "correlation", "graph_node")
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "kernel": _ON_GPU,
    "gpu_memcpy": (*_ON_GPU, "bytes"),
    "gpu_memset": (*_ON_GPU, "bytes"),
    "cuda_runtime": ("correlation",),
    "cuda_driver": ("correlation",),
    _OPERATOR: ("sequence", "forward_thread"),
}
"""The arguments that are kept of each category."""
_IN_FILE = {"graph_node": "graph node id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"}
_ESSENTIAL = ("args.correlation", "args.device")
"""Arguments without which no operation of a category could be told from another."""
_SHAPES = ("dims", "types", "concrete")
_NO_ARGS = Args()


@dataclass(frozen=True)
class Rows:
    """Some complete events; arrays have the shape ``(n,)``.

    Attributes:
        names: The distinct names of the trace.
        code: Index into `names`.
        start_ns, end_ns: When each began and ended.
        tid: Its thread.
        numbers: Its arguments that are whole numbers, `MISSING` where an event lacks one.
        told: Arguments of the events that tell of a collective, by place.
        shapes: Of each event the place of what it says of its arguments in `Events.shapes`, where these are read.
    """

    names: Sequence[str]
    code: npt.NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array
    tid: Int64Array
    numbers: Mapping[str, Int64Array] = field(default_factory=dict)
    told: Mapping[int, Args] = field(default_factory=dict)
    shapes: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.code)

    def take(self, which: Any) -> Rows:
        """Some of them; what they tell of collectives and shapes is left behind."""
        numbers = {name: values[which] for name, values in self.numbers.items()}
        return Rows(self.names, self.code[which], self.start_ns[which], self.end_ns[which], self.tid[which], numbers)

    def number(self, name: str, missing: int = -1) -> Int64Array:
        """One of the arguments, another value standing for what is missing."""
        values = self.numbers.get(name)
        if values is None:
            return np.full(len(self), missing, dtype=np.int64)
        return np.where(values == MISSING, missing, values)

    def by_name(self, value: Callable[[str], Any], dtype: Any = object) -> npt.NDArray[Any]:
        """What each event's name stands for; the function is asked once for each name."""
        known = self._known()
        found = np.zeros(len(self.names), dtype=dtype)
        for code in known.tolist():
            found[code] = value(self.names[code])
        made: npt.NDArray[Any] = found[self.code]
        return made

    def label(self, value: Callable[[str], str] = str) -> Any:
        """The names, or what is made of them, as a categorical column."""
        known = self._known()
        place = np.zeros(len(self.names), dtype=np.int32)
        place[known] = np.arange(len(known), dtype=np.int32)
        return labels(place[self.code], [value(self.names[code]) for code in known.tolist()])

    def _known(self) -> Int64Array:
        """The distinct codes; there are few, so counting them takes less time and memory than sorting all."""
        return np.flatnonzero(np.bincount(self.code, minlength=1)) if len(self.code) else np.zeros(0, dtype=np.int64)


def joined(parts: Sequence[Rows], wanted: Sequence[str] = ()) -> Rows:
    """Events of several categories, one behind the other, with those of their arguments that are wanted; one that only
    some have is missing in the others.
    """
    numbers = {name: np.concatenate([one.number(name, MISSING) for one in parts]) for name in wanted}
    code, start, end, tid = (
        np.concatenate([getattr(one, name) for one in parts]) for name in ("code", "start_ns", "end_ns", "tid")
    )
    return Rows(parts[0].names, code, start, end, tid, numbers)


@dataclass(frozen=True)
class Arrows:
    """The ends of the arrows from forward to backward, shape ``(n,)`` each.

    Attributes:
        begins: Whether it is the forward's end.
        id: What both ends bear.
        start_ns: When.
        tid: On which thread.
    """

    begins: npt.NDArray[np.bool_]
    id: Int64Array
    start_ns: Int64Array
    tid: Int64Array


class Events:
    """The complete ("X") events of a trace by category, and its arrows from forward to backward.

    Attributes:
        arrows: The ends of the arrows.
        process: The process that was traced; None where no event tells it.
        warnings: Sentences on what events lack.
        shapes: What operators say of their arguments, each distinct one once, where that is read.
    """

    def __init__(self, batches: Iterable[Sequence[Row]], named: Path = Path("trace"), *, shapes: bool = False) -> None:
        """Sort the events of a trace. Older versions wrote the categories with capitals; our ranges come as operators,
        which costs the recorder least, and count as annotations.

        Args:
            batches: The events in the file's order, in lists of any length.
            named: The path to name in messages.
            shapes: Whether to keep what operators say of their arguments.

        Raises:
            CaptureError: Events lack what they must have; the message names category and key.
        """
        self.warnings: list[str] = []
        self._missing: Counter[tuple[str, str]] = Counter()
        self._names: dict[str, int] = {}
        self._shapes: dict[tuple[Any, ...], int] | None = {} if shapes else None
        self._columns: dict[str, _Columns] = {}
        arrows = _ArrowColumns()
        pids = self._read(batches, arrows)
        self._check(named)
        names = [_HALF_LETTER.sub("\ufffd", name) for name in self._names]
        self._rows = {category: found.rows(names, named) for category, found in self._columns.items()}
        self._columns.clear()
        self._none = _Columns("", {}).rows(names, named)
        self.shapes = list(self._shapes or ())
        self.arrows = arrows.made(named)
        known = [pids[one] for one in (*CALL_CATEGORIES, _OPERATOR, _ANNOTATION) if one in pids]
        self.process = (number(known[0]) or 0) if known else None

    def _read(self, batches: Iterable[Sequence[Row]], arrows: _ArrowColumns) -> dict[str, Any]:
        """Sort the events into columns; gives the process of each category's first."""
        pids: dict[str, Any] = {}
        for batch in batches:
            groups: dict[tuple[str | None, str | None], list[Row]] = {}
            for row in batch:
                groups.setdefault((row.ph, row.cat), []).append(row)
            for (kind, said), rows in groups.items():
                category = (said or "").lower()
                category = _OLDER.get(category, category)
                if kind == "X" and category in KINETO_SOURCES:
                    pids.setdefault(category, rows[0].pid)
                    self._add(category, rows)
                elif kind == "X" and said is None:
                    self._missing["", "cat"] += len(rows)
                elif category == _ARROW:
                    arrows.add(rows)
                elif category in KINETO_SOURCES:
                    self._missing[category, "ph"] += sum(row.dur is not None for row in rows)
        return pids

    def _add(self, category: str, rows: list[Row]) -> None:
        """Keep events, or count what they lack."""
        for row in rows:
            if not isinstance(row.name, str):
                self._missing[category, "name"] += 1
                row.name = ""
            if row.args is UNREADABLE:
                self._missing[category, "args"] += 1
        if category == _PYTHON:  # of the Python functions only modules and garbage collections are read
            rows = [row for row in rows if not row.name or row.name.startswith((_MODULE, _COLLECTION))]
        ours = [row for row in rows if row.name.startswith(_OURS)]
        for where, some in (
            (_ANNOTATION, ours),
            (category, [row for row in rows if not row.name.startswith(_OURS)] if ours else rows),
        ):
            if some:
                columns = self._columns.setdefault(where, _Columns(where, self._names, self._shapes))
                columns.add(category, some, self._missing)

    def _check(self, named: Path) -> None:
        """Refuse a trace whose events lack what no trace lacks, and note what some of them lack."""
        for category, found in self._columns.items():
            for key in KINETO_SOURCES[category]:
                _, _, tail = key.partition(".")
                if tail:
                    lacking = found.numbers[tail].count(MISSING)
                    self._lacking(named, category, key, lacking, len(found.code))
        for (category, key), lacking in self._missing.items():
            if not lacking:
                continue
            if key in ("args", "ph", "cat"):
                what = f"{lacking} {category or 'complete'} events have no {key} that can be read"
                if key == "ph" or (key == "cat" and not self._columns):
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

    def of(self, category: str) -> Rows:
        """The events of a category."""
        return self._rows.get(category, self._none)

    @property
    def gpu(self) -> list[tuple[str, Rows]]:
        """What ran on the GPU: kind of operation and events."""
        return [(kind, self.of(category)) for category, kind in GPU_CATEGORIES.items()]

    @property
    def calls(self) -> Rows:
        """Calls of the CUDA runtime and driver."""
        return joined([self.of(category) for category in CALL_CATEGORIES], ["correlation"])

    @property
    def operators(self) -> Rows:
        """Operators on the CPU, our ranges not among them."""
        return self.of(_OPERATOR)

    @property
    def annotations(self) -> Rows:
        """What the program annotated, our ranges among it."""
        return self.of(_ANNOTATION)

    @property
    def modules(self) -> Rows:
        """Calls of modules, in a trace with stacks."""
        found = self.of(_PYTHON)
        return found.take(found.by_name(lambda name: not name.startswith(_COLLECTION), bool))

    @property
    def collections(self) -> Rows:
        """Garbage collections, where ``record_python_gc_info`` was asked for."""
        found = self.of(_PYTHON)
        return found.take(found.by_name(lambda name: name.startswith(_COLLECTION), bool))


class _Columns:
    """Columns of one category that grow batch by batch."""

    def __init__(self, category: str, names: dict[str, int], shapes: dict[tuple[Any, ...], int] | None = None) -> None:
        self._names = names
        self._shapes = shapes if category == _OPERATOR else None
        self.ts, self.dur, self.tid, self.code, self.shape = array("d"), array("d"), array("q"), array("i"), array("i")
        self.numbers = {name: array("q") for name in _COLUMNS.get(category, ())}
        self.told: dict[int, Args] = {}
        self._may_tell = category == "kernel"

    def add(self, category: str, rows: Sequence[Row], missing: Counter[tuple[str, str]]) -> None:
        """Append events, and count what they lack by the name of their category in the file."""
        args = [row.args or _NO_ARGS for row in rows]
        if self._may_tell:
            place = len(self.code)
            for offset, one in enumerate(args):
                if one.in_elements is not None or one.out_elements is not None:
                    self.told[place + offset] = one
        names = self._names
        self.code.extend([names.setdefault(row.name, len(names)) for row in rows])
        needed = KINETO_SOURCES[category]
        for key, column, values in (
            ("ts", self.ts, [row.ts for row in rows]),
            ("dur", self.dur, [row.dur for row in rows]),
        ):
            try:
                column.extend(_floats(values))
            except (TypeError, OverflowError):
                found = [_float(value) for value in values]
                missing[category, key] += found.count(None)
                column.extend([0.0 if value is None else value for value in found])
        lacking = _extend(self.tid, [row.tid for row in rows], 0)[0]
        if "tid" in needed:
            missing[category, "tid"] += lacking
        for name, values_of in self.numbers.items():
            _, unreadable = _extend(values_of, [getattr(one, name) for one in args], MISSING)
            if name in ("sequence", "forward_thread") and unreadable:
                missing[category, f"args.{_IN_FILE[name]}"] += unreadable
        if self._shapes is not None:
            known = self._shapes
            self.shape.extend([
                known.setdefault(tuple(_plain(getattr(one, name, None)) for name in _SHAPES), len(known))
                for one in args
            ])  # fmt: skip

    def rows(self, names: Sequence[str], named: Path) -> Rows:
        """The columns as arrays."""
        start = whole_ns(named, "ts", np.frombuffer(self.ts, dtype=np.float64))
        self.ts = array("d")
        end = whole_ns(named, "dur", np.frombuffer(self.dur, dtype=np.float64))
        self.dur = array("d")
        end += start
        check_spans(named, "events (ts + dur)", start, end)
        numbers = {name: np.frombuffer(values, dtype=np.int64) for name, values in self.numbers.items()}
        tid, code = np.frombuffer(self.tid, dtype=np.int64), np.frombuffer(self.code, dtype=np.int32)
        shapes = np.frombuffer(self.shape, dtype=np.int32) if self._shapes is not None else None
        return Rows(names, code, start, end, tid, numbers, self.told, shapes)


class _ArrowColumns:
    """Ends of arrows as columns that grow batch by batch."""

    def __init__(self) -> None:
        self._begins, self._ts, self._tid, self._id = array("b"), array("d"), array("q"), array("q")
        self._texts: dict[Any, int] = {}

    def add(self, rows: Sequence[Row]) -> None:
        """Append events of both kinds."""
        self._begins.extend([row.ph == "s" for row in rows])
        self._ts.extend([_float(row.ts) or 0.0 for row in rows])
        self._tid.extend([number(row.tid) or 0 for row in rows])
        self._id.extend([self._number(row.id) for row in rows])

    def _number(self, id_: Any) -> int:
        """An id that is a number stands for itself; another is numbered downwards."""
        if isinstance(id_, int) and -(2**62) < id_ < 2**62:
            return int(id_)
        return -(2**62) - self._texts.setdefault(id_ if isinstance(id_, (int, str)) else None, len(self._texts))

    def made(self, named: Path) -> Arrows:
        """The arrows."""
        start = whole_ns(named, "ts", np.frombuffer(self._ts, dtype=np.float64))
        ids, tid = np.frombuffer(self._id, dtype=np.int64), np.frombuffer(self._tid, dtype=np.int64)
        return Arrows(np.frombuffer(self._begins, dtype=np.bool_), ids, start, tid)


def _floats(values: list[Any]) -> array[float]:
    if not {*map(type, values)} <= {float, int}:
        raise TypeError("not all are numbers")
    return array("d", values)


def _extend(column: array[int], values: list[Any], absent: int) -> tuple[int, int]:
    """Append whole numbers to a column; gives how many are missing or cannot be read, and how many of them are there
    and cannot be read.
    """
    lacking = values.count(None)
    plain = [absent if value is None else value for value in values] if lacking else values
    try:
        if {*map(type, plain)} <= {int}:
            column.extend(array("q", plain))
            return lacking, 0
    except OverflowError:
        pass
    read = [number(value) for value in values]
    column.extend([absent if value is None else value for value in read])
    return read.count(None), read.count(None) - lacking


def _plain(value: Any) -> Any:
    """A JSON value as something that can be the key of a dict."""
    return tuple(map(_plain, value)) if isinstance(value, list) else None if isinstance(value, dict) else value


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
