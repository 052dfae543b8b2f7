"""The events of a Kineto trace as columns by category, with required fields checked. Times in the file are microseconds
with three decimals; here they are integer nanoseconds.

No event is kept as a Python object: a trace has millions, and a column takes eight bytes per event.
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

from nvprof_kit._trace.files.checks import strays, whole_ns
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.kineto.stream import UNREADABLE, Args, Row
from nvprof_kit._trace.schema import KINETO_SOURCES, LONG_FRAME_NS
from nvprof_kit._trace.validate import check_moments
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues
from nvprof_kit.names import DOMAIN

Int64Array = npt.NDArray[np.int64]

GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of GPU operations, with the kind of each."""

CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
"""Categories of CUDA calls."""

MISSING = int(np.iinfo(np.int64).min)
"""Means that an event lacks the argument."""

ANNOTATIONS, OPERATORS = "user_annotation", "cpu_op"
"""Categories of user annotations, including ranges of this package, and of CPU operators without them."""

FUNCTIONS, MODULES, COLLECTIONS = "python_function", "modules", "collections"
"""Python calls in a trace with stacks: functions of `LONG_FRAME_NS` or more, modules; and garbage collections, if
recorded with ``record_python_gc_info``.
"""

_ARROW = "fwdbwd"
_OLDER = {"operator": OPERATORS, "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_OURS = f"{DOMAIN}:"
_MODULE, _COLLECTION = "nn.Module: ", "Python GC"
_HALF_LETTER = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_ON_GPU = ("device", "stream", "correlation", "graph_node")
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "kernel": _ON_GPU,
    "gpu_memcpy": (*_ON_GPU, "bytes"),
    "gpu_memset": (*_ON_GPU, "bytes"),
    "cuda_runtime": ("correlation", "kernel"),
    "cuda_driver": ("correlation", "kernel"),
    OPERATORS: ("sequence", "forward_thread"),
}
"""The arguments kept for each category."""
_IN_FILE = {"graph_node": "graph node id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"}
_ESSENTIAL = ("args.correlation", "args.device")
"""Arguments required to identify an operation of a category."""
_SHAPES = ("dims", "types", "concrete", "strides")
_NO_ARGS = Args()
_PARAMETERS = "record_param_comms"


_NOT_READ = frozenset({
    "trace", "ac2g", "fwdbwd", "async_cpu_to_gpu", "async_gpu", "gpu_user_annotation", "external_correlation",
    "cpu_instant_event", "cuda_sync", "cuda_event", "cuda_profiler_range", "gpu_pm_counter", "collective_comm",
    "glow_runtime", "hpu_op", "mtia_runtime", "mtia_ccp_events", "mtia_insight", "mtia_workloadd", "xpu_runtime",
    "xpu_driver", "privateuse1_runtime", "privateuse1_driver", "triton",
})  # fmt: skip
"""Kineto's other categories of complete events (ActivityType.cpp of libkineto)."""


@dataclass(frozen=True)
class Rows:
    """Complete ("X") events as columns; arrays have the shape ``(n,)``.

    Attributes:
        names: The distinct names of the trace.
        code: Index into `names`.
        start_ns, end_ns: Start and end times, in ns since the first event of the trace.
        tid: Thread ids.
        numbers: Integer arguments; `MISSING` if an event lacks one.
        collective_arguments: Arguments of the events with collective metadata, by index.
        shapes: Index of each event's arguments in `Events.shapes`, if shapes are read.
    """

    names: Sequence[str]
    code: npt.NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array
    tid: Int64Array
    numbers: Mapping[str, Int64Array] = field(default_factory=dict)
    collective_arguments: Mapping[int, Args] = field(default_factory=dict)
    shapes: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.code)

    def take(self, index: Any) -> Rows:
        """A subset, without collective metadata and shapes."""
        numbers = {name: values[index] for name, values in self.numbers.items()}
        return Rows(self.names, self.code[index], self.start_ns[index], self.end_ns[index], self.tid[index], numbers)

    def columns(self, process: int) -> dict[str, Any]:
        """The columns that the schema's tables of events share: ``start_ns``, ``end_ns``, ``pid``, ``tid``."""
        pid = np.full(len(self), process, dtype=np.int64)
        return {"start_ns": self.start_ns, "end_ns": self.end_ns, "pid": pid, "tid": self.tid}

    def number(self, name: str, missing: int = -1) -> Int64Array:
        """One of the arguments, with another value for missing ones."""
        values = self.numbers.get(name)
        if values is None:
            return np.full(len(self), missing, dtype=np.int64)
        return np.where(values == MISSING, missing, values)

    def by_name(self, value: Callable[[str], Any], dtype: Any = object) -> npt.NDArray[Any]:
        """A value per event, computed once per distinct name."""
        present = self._known()
        of_code = np.zeros(len(self.names), dtype=dtype)
        for code in present.tolist():
            of_code[code] = value(self.names[code])
        of_row: npt.NDArray[Any] = of_code[self.code]
        return of_row

    def label(self, value: Callable[[str], str] = str) -> Any:
        """The names, optionally transformed, as a categorical column."""
        present = self._known()
        new_code = np.zeros(len(self.names), dtype=np.int32)
        new_code[present] = np.arange(len(present), dtype=np.int32)
        return labels(new_code[self.code], [value(self.names[code]) for code in present.tolist()])

    def _known(self) -> Int64Array:
        """The distinct codes. There are few, so counting is faster than sorting and takes less memory."""
        return np.flatnonzero(np.bincount(self.code, minlength=1)) if len(self.code) else np.zeros(0, dtype=np.int64)


def joined(parts: Sequence[Rows], columns: Sequence[str] = ()) -> Rows:
    """Concatenate events of several categories with the wanted arguments; `MISSING` where a category lacks one."""
    numbers = {name: np.concatenate([rows.number(name, MISSING) for rows in parts]) for name in columns}
    code, start, end, tid = (
        np.concatenate([getattr(rows, name) for rows in parts]) for name in ("code", "start_ns", "end_ns", "tid")
    )
    return Rows(parts[0].names, code, start, end, tid, numbers)


class Events:
    """The complete ("X") events of a trace by category, and its forward-backward flow events.

    Attributes:
        arrows: The end points of the flow events: is_forward_end, id (shared by both ends), start_ns, tid.
        process: The traced process; None if unknown.
        warnings: Warnings about missing fields.
        shapes: The distinct operator arguments (shapes and dtypes), if read.
    """

    def __init__(self, batches: Iterable[Sequence[Row]], named: Path = Path("trace"), *, shapes: bool = False) -> None:
        """Sort the events of a trace by category. Older versions capitalize categories. Ranges of this package are
        recorded as operators, which has the lowest overhead, and count as annotations.

        Args:
            batches: The events in file order, in lists of any length.
            named: The path to name in messages.
            shapes: Whether to keep the recorded arguments of operators.

        Raises:
            CaptureError: Events lack required fields; the message has the category and the key.
        """
        self.warnings: list[Issue] = []
        self._missing: Counter[tuple[str, str]] = Counter()
        self._names: dict[str, int] = {}
        self._shapes: dict[tuple[Any, ...], int] | None = {} if shapes else None
        self._columns: dict[str, _Columns] = {}
        arrows: list[Row] = []
        pids = self._read(batches, arrows)
        self._check(named)
        names = [_HALF_LETTER.sub("\ufffd", name) for name in self._names]
        self._rows = {category: columns.rows(names, named) for category, columns in self._columns.items()}
        self._columns.clear()
        self._none = _Columns("", {}).rows(names, named)
        edges = {name: columns.start_ns for name, columns in self._rows.items()}
        check_moments(named, (*edges.values(), *(columns.end_ns for columns in self._rows.values())))
        self.warnings += as_issues("strays", strays(edges))
        self.shapes = list(self._shapes or ())
        self.arrows: dict[str, Any] = {
            "is_forward_end": np.array([row.ph == "s" for row in arrows], dtype=bool),
            "id": [str(row.id) for row in arrows],
            "start_ns": whole_ns(named, "ts", np.array([_float(row.ts) or 0.0 for row in arrows], dtype=np.float64)),
            "tid": np.array([number(row.tid) or 0 for row in arrows], dtype=np.int64),
        }
        # the file counts from when the computer started, or from 1970
        begin_ns = min((int(starts.min()) for starts in edges.values() if len(starts)), default=0)
        columns = [column for rows in self._rows.values() for column in (rows.start_ns, rows.end_ns)]
        for column in (*columns, self.arrows["start_ns"]):
            np.subtract(column, begin_ns, out=column)
        cpu_pids = [pids[kind] for kind in (*CALL_CATEGORIES, OPERATORS, ANNOTATIONS) if kind in pids]
        self.process = (number(cpu_pids[0]) or 0) if cpu_pids else None

    def _read(self, batches: Iterable[Sequence[Row]], arrows: list[Row]) -> dict[str, Any]:
        """Sort the events into columns; returns the process of the first event of each category."""
        pids: dict[str, Any] = {}
        unknown: Counter[str] = Counter()
        for batch in batches:
            groups: dict[tuple[str | None, str | None], list[Row]] = {}
            for row in batch:
                groups.setdefault((row.ph, row.cat), []).append(row)
            for (kind, cat), rows in groups.items():
                category = (cat or "").lower()
                category = _OLDER.get(category, category)
                if kind == "X" and category in KINETO_SOURCES:
                    pids.setdefault(category, rows[0].pid)
                    self._add(category, rows)
                elif kind == "X" and cat is None:
                    self._missing["", "cat"] += len(rows)
                elif category == _ARROW:
                    arrows += rows
                elif category in KINETO_SOURCES:
                    self._missing[category, "ph"] += sum(row.dur is not None for row in rows)
                elif kind == "X" and category not in _NOT_READ:
                    unknown[category] += len(rows)
        self.warnings += [
            Issue(
                "unknown-category",
                "warning",
                1.0,
                f"cat is {category[:80]!r} in {count} events, a category that is not known: they are not read",
            )
            for category, count in unknown.most_common(3)
        ]
        return pids

    def _add(self, category: str, rows: list[Row]) -> None:
        """Add events, or count missing fields."""
        for row in rows:
            if not isinstance(row.name, str):
                self._missing[category, "name"] += 1
                row.name = ""
            if row.args is UNREADABLE:
                self._missing[category, "args"] += 1
        parts = {ANNOTATIONS: [row for row in rows if row.name.startswith(_OURS)]}
        if parts[ANNOTATIONS]:
            rows = [row for row in rows if not row.name.startswith(_OURS)]
        if category == FUNCTIONS:
            parts[MODULES] = [row for row in rows if not row.name or row.name.startswith(_MODULE)]
            parts[COLLECTIONS] = [row for row in rows if row.name.startswith(_COLLECTION)]
            functions = [row for row in rows if row.name and not row.name.startswith((_MODULE, _COLLECTION))]
            rows = [row for row in functions if isinstance(row.dur, float | int) and row.dur >= LONG_FRAME_NS / 1000]
        for kind, events in {**parts, category: [*parts.get(category, ()), *rows]}.items():
            if events:
                columns = self._columns.setdefault(kind, _Columns(kind, self._names, self._shapes))
                columns.add(category, events, self._missing)

    def _check(self, named: Path) -> None:
        """Reject a trace without required fields, and add warnings about fields missing in some events."""
        for category, columns in self._columns.items():
            for key in KINETO_SOURCES.get(category, {}):
                _, _, tail = key.partition(".")
                if tail:
                    lacking = columns.numbers[tail].count(MISSING)
                    if lacking == len(columns.code) and key in _ESSENTIAL:
                        text = f"no {category} event has {key}, or one that is a number"
                        raise CaptureError(f"{named}: {text}; record it again")
                    if lacking:
                        count = len(columns.code)
                        text = f"{lacking} of {count} {category} events have no {key}, or none that is a number"
                        self.warnings.append(Issue("missing-field", "warning", lacking / count, text))
        for (category, key), lacking in self._missing.items():
            if not lacking:
                continue
            if key in ("args", "ph", "cat"):
                sentence = f"{lacking} {category or 'complete'} events have no {key} that can be read"
                if key == "ph" or (key == "cat" and not self._columns):
                    raise CaptureError(f"{named}: {sentence}; the trace is damaged: record it again")
                text = f"{sentence}: they are left out, or what it says is"
                self.warnings.append(Issue("unreadable-events", "warning", 1.0, text))
                continue
            raise CaptureError(
                f"{named}: {lacking} {category} events have no {key}, or none that can be read; the trace is damaged: "
                "record it again"
            )

    def of(self, category: str) -> Rows:
        """The events of a category."""
        return self._rows.get(category, self._none)

    @property
    def gpu(self) -> list[tuple[str, Rows]]:
        """GPU operations: kind and events."""
        return [(kind, self.of(category)) for category, kind in GPU_CATEGORIES.items()]

    @property
    def calls(self) -> Rows:
        """Calls of the CUDA runtime and driver."""
        return joined([self.of(category) for category in CALL_CATEGORIES], ["correlation"])


class _Columns:
    """Columns of one category that grow batch by batch."""

    def __init__(self, category: str, names: dict[str, int], shapes: dict[tuple[Any, ...], int] | None = None) -> None:
        self._names = names
        self._shapes = shapes if category == OPERATORS else None
        self.ts, self.dur, self.tid, self.code, self.shape = array("d"), array("d"), array("q"), array("i"), array("i")
        self.numbers = {name: array("q") for name in _COLUMNS.get(category, ())}
        self.collective_arguments: dict[int, Args] = {}
        self._may_tell = category in ("kernel", OPERATORS)

    def add(self, category: str, rows: Sequence[Row], missing: Counter[tuple[str, str]]) -> None:
        """Append events, and count missing fields by the category name in the file."""
        args = [row.args or _NO_ARGS for row in rows]
        row_count = len(self.code)
        names = self._names
        self.code.extend([names.setdefault(row.name, len(names)) for row in rows])
        if self._may_tell and (category != OPERATORS or _PARAMETERS in names):
            passes_on = category == OPERATORS  # only of sends and receives can the kernels lack the arguments
            for offset, argument in enumerate(args):
                if passes_on and argument.source is None and argument.destination is None:
                    continue
                if argument.in_elements is not None or argument.out_elements is not None:
                    self.collective_arguments[row_count + offset] = argument
        required = KINETO_SOURCES[category]
        for key, column in (("ts", self.ts), ("dur", self.dur), ("tid", self.tid)):
            lacking, _ = _extend(column, [getattr(row, key) for row in rows], 0)
            if key in required:
                missing[category, key] += lacking
        for name, values_of in self.numbers.items():
            if name == "kernel":  # ROCm's calls say which kernel they launch
                kernels = [argument.kernel for argument in args]
                values_of.extend([names.setdefault(k, len(names)) if isinstance(k, str) else MISSING for k in kernels])
                continue
            _, unreadable = _extend(values_of, [getattr(argument, name) for argument in args], MISSING)
            if name in ("sequence", "forward_thread") and unreadable:
                missing[category, f"args.{_IN_FILE[name]}"] += unreadable
        if self._shapes is not None:
            codes = self._shapes
            self.shape.extend([
                codes.setdefault(tuple(_plain(getattr(argument, name, None)) for name in _SHAPES), len(codes))
                for argument in args
            ])  # fmt: skip

    def rows(self, names: Sequence[str], named: Path) -> Rows:
        """The columns as arrays."""
        start = whole_ns(named, "ts", np.frombuffer(self.ts, dtype=np.float64))
        self.ts = array("d")
        end = whole_ns(named, "dur", np.frombuffer(self.dur, dtype=np.float64))
        self.dur = array("d")
        end += start
        numbers = {name: np.frombuffer(values, dtype=np.int64) for name, values in self.numbers.items()}
        tid, code = np.frombuffer(self.tid, dtype=np.int64), np.frombuffer(self.code, dtype=np.int32)
        shapes = np.frombuffer(self.shape, dtype=np.int32) if self._shapes is not None else None
        return Rows(names, code, start, end, tid, numbers, self.collective_arguments, shapes)


def _extend(column: array[Any], values: list[Any], absent: float) -> tuple[int, int]:
    """Append numbers to a column; returns the number of missing or unreadable values, and the number of unreadable
    ones among them.
    """
    types, parse = ({int}, number) if column.typecode == "q" else ({int, float}, _float)
    lacking = values.count(None)
    plain = [absent if value is None else value for value in values] if lacking else values
    try:
        if {*map(type, plain)} <= types:
            column.extend(array(column.typecode, plain))
            return lacking, 0
    except OverflowError:
        pass
    parsed = [parse(value) for value in values]
    column.extend([absent if value is None else value for value in parsed])
    return parsed.count(None), parsed.count(None) - lacking


def _plain(value: Any) -> Any:
    """A JSON value in hashable form."""
    return tuple(map(_plain, value)) if isinstance(value, list) else None if isinstance(value, dict) else value


def _float(value: Any) -> float | None:
    """A time, which may be a string in the file; None if invalid."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else None
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def number(value: Any) -> int | None:
    """An integer, which may be a string in the file; None if invalid. Ids are unsigned in the file: values from 2**63
    become negative, as in an nsys export.
    """
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        return None
    return value - 2**64 if value >= 2**63 else value
