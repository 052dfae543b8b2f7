"""The events of a Kineto trace as a table per category, with required fields checked. Times in the file are
microseconds with three decimals; here they are integer nanoseconds.

No event is kept as a Python object: a trace has millions, and a column takes eight bytes per event.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.joins import Int64Array
from nvprof_kit._trace.kineto.stream import ARGUMENTS, NAMES, UNREADABLE, Args, inputs_of
from nvprof_kit._trace.schema import KINETO_SOURCES, LONG_FRAME_NS
from nvprof_kit._trace.validate import FILE_DAMAGED, check_time_span
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:  # imported once the events are read, so that both are not in memory at the same time
    import pandas as pd

GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of GPU operations, with the kind of each."""

CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
"""Categories of CUDA calls."""

ANNOTATIONS, OPERATORS = "user_annotation", "cpu_op"
"""Categories of user annotations, including ranges of this package, and of CPU operators without them."""

FUNCTIONS, MODULES, COLLECTIONS = "python_function", "modules", "collections"
"""Python calls in a trace with stacks: functions of `LONG_FRAME_NS` or more, modules; and garbage collections, if
recorded with ``record_python_gc_info``.
"""

_ARROW = "fwdbwd"
_OURS = f"{DOMAIN}:"
MODULE, _COLLECTION = "nn.Module: ", "Python GC"
_HALF_LETTER = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_EVENT = {"name": "i", "ts": "d", "dur": "d", "tid": "q"}
"""The fields of every event, and the type codes of their columns; a name is its number among the names of the trace."""
_ARGUMENTS: Mapping[str, Sequence[str]] = NAMES["arguments"]
"""The arguments of each category that are integers, or names of kernels."""
_MISSING = {"device": 0, "forward_thread": 0}
"""What stands for a missing argument, if not -1."""
_ESSENTIAL = ("args.correlation", "args.device")
"""Arguments required to identify an operation of a category."""
_NO_ARGS = Args()
_PARAMETERS = "record_param_comms"


_SAMPLE, _FEW = 10_000, 20
"""How many events of a kind are looked at to find where most are, and how few are too few."""


class Events:
    """The complete ("X") events of a trace by category, and its forward-backward flow events.

    Attributes:
        names: The distinct names of the trace; '' is the first.
        messages: Arguments of kernels and operators with collective metadata, by category and row.
        inputs: The distinct inputs of operators as JSON text, if read; the column ``inputs`` of operators numbers them.
        arrows: The end points of the flow events: is_forward_end, id (shared by both ends), start_ns, tid.
        process: The traced process; None if unknown.
        warnings: Warnings about missing fields.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], named: Path = Path("trace"), *, shapes: bool = False) -> None:
        """Sort the events of a trace by category. Older versions capitalize categories. Ranges of this package are
        recorded as operators, which has the lowest overhead, and count as annotations.

        Args:
            batches: The events in file order, in lists of any length.
            named: The path to name in messages.
            shapes: Whether to keep the recorded inputs of operators.

        Raises:
            CaptureError: Events lack required fields; the message has the category and the key.
        """
        self.warnings: list[Issue] = []
        self.messages: dict[str, dict[int, Any]] = {"kernel": {}, OPERATORS: {}}
        self._number_of_name, self._number_of_inputs = {"": 0}, dict[bytes, int]()
        self._shapes = shapes
        self._columns: dict[str, dict[str, array[Any]]] = {}
        self._lacking: Counter[tuple[str, str]] = Counter()
        pids, arrows = self._read(batches)
        self._check(named)
        import pandas as pd

        self.names = [_HALF_LETTER.sub("\ufffd", name) for name in self._number_of_name]
        self.inputs = list(self._number_of_inputs)
        spans: dict[str, tuple[Int64Array, Int64Array]] = {}
        for category, columns in self._columns.items():
            start_ns = _whole_ns(named, "ts", np.asarray(columns.pop("ts")))
            spans[category] = start_ns, start_ns + _whole_ns(named, "dur", np.asarray(columns.pop("dur")))
        check_time_span(named, [edge for span in spans.values() for edge in span])
        starts = {category: start_ns for category, (start_ns, _) in spans.items()}
        self.warnings += strays(starts)
        # the file counts from when the computer started, or from 1970
        begin_ns = min((int(start_ns.min()) for start_ns in starts.values()), default=0)
        self._tables: dict[str, pd.DataFrame] = {}
        for category, columns in self._columns.items():
            start_ns, end_ns = (np.subtract(edge, begin_ns, out=edge) for edge in spans[category])
            arrays = {name: np.asarray(column) for name, column in columns.items()}
            self._tables[category] = pd.DataFrame({"start_ns": start_ns, "end_ns": end_ns, **arrays}, copy=False)
        self._columns.clear()
        arrow_us = np.array([_float(row.ts) or 0.0 for row in arrows], dtype=np.float64)
        self.arrows = pd.DataFrame(
            {
                "is_forward_end": np.array([row.ph == "s" for row in arrows], dtype=bool),
                "id": [str(row.id) for row in arrows],
                "start_ns": _whole_ns(named, "ts", arrow_us) - begin_ns,
                "tid": np.array([number(row.tid) or 0 for row in arrows], dtype=np.int64),
            }
        )
        cpu_pids = [pids[kind] for kind in (*CALL_CATEGORIES, OPERATORS, ANNOTATIONS) if kind in pids]
        self.process = (number(cpu_pids[0]) or 0) if cpu_pids else None

    def of(self, *categories: str) -> pd.DataFrame:
        """The events of some categories: ``name`` (a number), ``start_ns``, ``end_ns``, ``tid`` and the arguments of
        any of them, with -1 where a category lacks one.
        """
        import pandas as pd

        if len(categories) == 1 and categories[0] in self._tables:
            return self._tables[categories[0]]
        arguments = (name for category in categories for name in _ARGUMENTS.get(category, ()))
        tables = [self._tables[category] for category in categories if category in self._tables]
        joined = {}
        for name in dict.fromkeys(("name", "start_ns", "end_ns", "tid", *arguments)):
            parts = (table[name] if name in table else np.full(len(table), -1) for table in tables)
            joined[name] = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        return pd.DataFrame(joined, copy=False)

    def spans(self, rows: pd.DataFrame) -> dict[str, Any]:
        """The columns that the schema's tables of events share: ``start_ns``, ``end_ns``, ``pid``, ``tid``."""
        pid = np.full(len(rows), self.process, dtype=np.int64)
        return {"start_ns": rows["start_ns"], "end_ns": rows["end_ns"], "pid": pid, "tid": rows["tid"]}

    def by_name(self, rows: pd.DataFrame, value: Callable[[str], Any], dtype: Any = object) -> npt.NDArray[Any]:
        """A value per event, computed once per distinct name."""
        code = rows["name"].to_numpy()
        of_code = np.zeros(len(self.names), dtype=dtype)
        for present in np.flatnonzero(np.bincount(code)).tolist():  # counting is faster than sorting
            of_code[present] = value(self.names[present])
        of_row: npt.NDArray[Any] = of_code[code]
        return of_row

    def label(self, codes: pd.Series[int], value: Callable[[str], str] = str) -> Any:
        """Names by their numbers, optionally transformed, as a categorical column; '' for -1."""
        code = np.maximum(codes.to_numpy(), 0)
        present = np.flatnonzero(np.bincount(code))
        position = np.zeros(len(self.names), dtype=np.int32)
        position[present] = np.arange(len(present), dtype=np.int32)
        return labels(position[code], [value(self.names[number]) for number in present.tolist()])

    def _read(self, batches: Iterable[Sequence[Any]]) -> tuple[dict[str, Any], list[Any]]:
        """Sort the events into columns; returns the process of the first event of each category, and the arrows."""
        pids: dict[str, Any] = {}
        arrows: list[Any] = []
        unknown: Counter[str] = Counter()
        for batch in batches:
            groups: dict[tuple[str | None, str | None], list[Any]] = {}
            for row in batch:
                groups.setdefault((row.ph, row.cat), []).append(row)
            for (kind, cat), rows in groups.items():
                category = (cat or "").lower()
                category = NAMES["older"].get(category, category)
                if kind == "X" and category in KINETO_SOURCES:
                    pids.setdefault(category, rows[0].pid)
                    self._add(category, rows)
                elif kind == "X" and cat is None:
                    self._lacking["", "cat"] += len(rows)
                elif category == _ARROW:
                    arrows += rows
                elif category in KINETO_SOURCES:
                    self._lacking[category, "ph"] += sum(row.dur is not None for row in rows)
                elif kind == "X" and category not in NAMES["not_read"]:
                    unknown[category] += len(rows)
        for category, count in unknown.most_common(3):
            self.warnings.append(Issue.of("unknown-category", category=category[:80], count=count))
        return pids, arrows

    def _add(self, category: str, rows: list[Any]) -> None:
        """Add events to the tables that they belong to, and count missing names and arguments."""
        for row in rows:
            if not isinstance(row.name, str):
                self._lacking[category, "name"] += 1
                row.name = ""
            if row.args is UNREADABLE:
                self._lacking[category, "args"] += 1
        parts = {ANNOTATIONS: [row for row in rows if row.name.startswith(_OURS)]}
        if parts[ANNOTATIONS]:
            rows = [row for row in rows if not row.name.startswith(_OURS)]
        if category == FUNCTIONS:
            parts[MODULES] = [row for row in rows if not row.name or row.name.startswith(MODULE)]
            parts[COLLECTIONS] = [row for row in rows if row.name.startswith(_COLLECTION)]
            functions = [row for row in rows if row.name and not row.name.startswith((MODULE, _COLLECTION))]
            rows = [row for row in functions if isinstance(row.dur, float | int) and row.dur >= LONG_FRAME_NS / 1000]
        for table, events in {**parts, category: [*parts.get(category, ()), *rows]}.items():
            if events:
                self._append(table, category, events)

    def _append(self, table: str, category: str, rows: list[Any]) -> None:
        """Append events of a category to the columns of a table, and count missing fields."""
        arguments, required = _ARGUMENTS.get(table, ()), KINETO_SOURCES[category]
        type_codes = _EVENT | dict.fromkeys(arguments, "q") | ({"inputs": "q"} if table == OPERATORS else {})
        columns = self._columns.setdefault(table, {name: array(code) for name, code in type_codes.items()})
        args = [row.args or _NO_ARGS for row in rows]
        names, first = self._number_of_name, len(columns["name"])
        columns["name"].extend([names.setdefault(row.name, len(names)) for row in rows])
        for field in ("ts", "dur", "tid"):
            lacking, _ = _extend(columns[field], [getattr(row, field) for row in rows], 0)
            self._lacking[category, field] += lacking if field in required else 0
        for argument in arguments:
            values = [getattr(arg, argument) for arg in args]
            if argument == "kernel":  # ROCm's calls say which kernel they launch
                values = [names.setdefault(name, len(names)) if isinstance(name, str) else None for name in values]
            lacking, unreadable = _extend(columns[argument], values, _MISSING.get(argument, -1))
            key = f"args.{ARGUMENTS[argument]}"
            self._lacking[category, key] += lacking if key in required else unreadable
        if table == OPERATORS:
            codes = self._number_of_inputs
            inputs = [codes.setdefault(inputs_of(arg), len(codes)) for arg in args] if self._shapes else [0] * len(args)
            columns["inputs"].extend(inputs)
        if table == "kernel" or (table == OPERATORS and _PARAMETERS in names):
            for row, arg in enumerate(args, first):
                # only of sends and receives can the kernels lack the arguments
                is_message = table == "kernel" or arg.source is not None or arg.destination is not None
                if is_message and (arg.in_elements is not None or arg.out_elements is not None):
                    self.messages[table][row] = arg

    def _check(self, named: Path) -> None:
        """Reject a trace without required fields, and add warnings about fields missing in some events."""
        for (category, key), lacking in self._lacking.items():
            events = f"{lacking} {category or 'complete'} events have no {key}"
            if not lacking:
                continue
            if key in KINETO_SOURCES.get(category, ()) and key.startswith("args."):
                count = len(self._columns[category]["name"])
                if lacking == count and key in _ESSENTIAL:
                    raise CaptureError.of("no-event-has", path=named, category=category, key=key)
                facts = {"count": lacking, "total": count, "category": category, "key": key}
                self.warnings.append(Issue.of("missing-field", lacking / count, **facts))
            elif key == "args" or (key == "cat" and self._columns):
                self.warnings.append(Issue.of("unreadable-events", events=events))
            else:
                raise CaptureError.of("damaged-events", path=named, events=events)


def strays(starts: Mapping[str, Int64Array]) -> list[Issue]:
    """Warnings about events that lie more than an hour, and a hundred times as long as nearly all others last together,
    before or after the others.

    Args:
        starts: Start times in ns by the name of the events in the file.
    """
    sampled = [times[:: max(len(times) // _SAMPLE, 1)] for times in starts.values()]
    sample = np.concatenate([np.empty(0, dtype=np.int64), *sampled])
    if len(sample) < _FEW:
        return []
    first, median, last = np.quantile(sample, (0.02, 0.5, 0.98), method="nearest")
    limit = max(100 * int(last - first), 3600 * 10**9)
    counts = {name: int(np.count_nonzero(np.abs(times - int(median)) > limit)) for name, times in starts.items()}
    return [Issue.of("strays", name=name, count=count) for name, count in counts.items() if count]


def _whole_ns(named: str | Path, noun: str, microseconds: npt.NDArray[np.float64]) -> Int64Array:
    """Convert microseconds to integer nanoseconds.

    Args:
        named: The file.
        noun: Their name in the file: ``dur``.
        microseconds: The values, shape ``(n,)``.

    Raises:
        CaptureError: A value is not a number or exceeds int64.
    """
    nanoseconds = np.rint(microseconds * 1000)
    wrong = microseconds[~(np.abs(nanoseconds) < 2**62)]
    if len(wrong):
        raise CaptureError(f"{named}: {noun} is {wrong[0]} in {len(wrong)} events; {FILE_DAMAGED}")
    return nanoseconds.astype(np.int64)


def _extend(column: array[Any], values: list[Any], missing: int) -> tuple[int, int]:
    """Append numbers to a column; returns the number of missing or unreadable values, and the number of unreadable
    ones among them.
    """
    types, parse = ({int}, number) if column.typecode == "q" else ({int, float}, _float)
    lacking = values.count(None)
    plain = [missing if value is None else value for value in values] if lacking else values
    try:
        if {*map(type, plain)} <= types:
            column.extend(array(column.typecode, plain))
            return lacking, 0
    except OverflowError:
        pass
    parsed = [parse(value) for value in values]
    column.extend([missing if value is None else value for value in parsed])
    return parsed.count(None), parsed.count(None) - lacking


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
