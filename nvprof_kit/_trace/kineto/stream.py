"""Streaming JSON reader: a few thousand events at a time, so neither the text nor the events are in memory as a whole.

msgspec decodes all events in a window of the file, and only the needed fields (docs/development.md compares the
alternatives). Events that msgspec rejects are decoded one by one with the more lenient standard library: lone
surrogates, NaN, arguments that are not objects.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from nvprof_kit._trace.files.packed import Bounded, room_for
from nvprof_kit.errors import CaptureError

_WINDOW = 4 << 20
_LONGEST_VALUE = 64 << 20
"""Longer than any event; text that cannot be decoded within it is damaged."""
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(strict=False)
_KEPT = ("schemaVersion", "deviceProperties")
_TRIES = 4
_BATCH = 10_000

_NAMES = {
    "graph_node": "graph node id",
    "sequence": "Sequence number",
    "forward_thread": "Fwd thread id",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_size": "Group size",
    "collective": "Collective name",
    "collective_sequence": "Seq",
    "group_name": "Process Group Name",
    "group_description": "Process Group Description",
    "group_ranks": "Process Group Ranks",
    "source": "Src Rank",
    "destination": "Dst Rank",
    "dims": "Input Dims",
    "types": "Input type",
    "concrete": "Concrete Inputs",
    "strides": "Input Strides",
}


class Args(msgspec.Struct, gc=False, rename=_NAMES):
    """The arguments read from an event, of any type."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    kernel: Any = None
    bytes: Any = None
    graph_node: Any = None
    sequence: Any = None
    forward_thread: Any = None
    in_elements: Any = None
    out_elements: Any = None
    dtype: Any = None
    group_size: Any = None
    collective: Any = None
    collective_sequence: Any = None
    group_name: Any = None
    group_description: Any = None
    group_ranks: Any = None
    source: Any = None
    destination: Any = None


class ShapeArgs(Args, gc=False, rename=_NAMES):
    """`Args` with the operator's inputs, for a trace recorded with shapes."""

    dims: Any = None
    types: Any = None
    concrete: Any = None
    strides: Any = None


class Row(msgspec.Struct, gc=False):
    """An event with the fields that are read."""

    ph: str | None = None
    cat: str | None = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    id: Any = None
    args: Args | None = None


class ShapeRow(Row, gc=False):
    """`Row` with shapes."""

    args: ShapeArgs | None = None


UNREADABLE = ShapeArgs()
"""The arguments of an event if ``args`` is not an object."""


def row_of(event: dict[str, Any]) -> Row:
    """Convert an event decoded by the standard library, with values of any type."""
    arguments = event.get("args")
    args = None if arguments is None else UNREADABLE
    if isinstance(arguments, dict):
        args = ShapeArgs(**{name: arguments.get(_NAMES.get(name, name)) for name in ShapeArgs.__struct_fields__})
    texts = {key: event[key] for key in ("ph", "cat") if isinstance(event.get(key), str)}
    return Row(**texts, **{key: event.get(key) for key in ("name", "pid", "tid", "ts", "dur", "id")}, args=args)


class TraceFile:
    """A trace file; its events are read once, in file order.

    Args:
        path: The file, plain or gzipped.
        named: The path to name in messages.
        shapes: Whether to read the inputs of operators.

    Attributes:
        other: Top-level values besides the events; complete after all events are read.
    """

    def __init__(self, path: Path, named: Path, *, shapes: bool = False) -> None:
        rows: Any = list[ShapeRow] if shapes else list[Row]
        self._decode = msgspec.json.Decoder(rows).decode
        self.other: dict[str, Any] = {}
        self._path, self._named = path, named
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    def batches(self) -> Iterator[list[Row]]:
        """The events of ``traceEvents`` or of a top-level list, a few thousand at a time.

        Raises:
            CaptureError: The file is truncated, damaged, not JSON, or not a trace.
        """
        try:
            with self._path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                raw = cast("IO[bytes]", gzip.open(file) if packed else file)  # noqa: SIM115  # the file is closed below
                limit = room_for(self._path.stat().st_size) if packed else None
                buffered = io.BufferedReader(Bounded(raw, limit, self._named), _WINDOW)
                self._file = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="replace")
                yield from self._parsed()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise CaptureError(
                f"{self._named}: the gzip file is cut off or damaged; record it again or copy it again"
            ) from None
        except json.JSONDecodeError as error:
            raise CaptureError(
                f"{self._named}: the JSON is cut off or damaged at character {self._before + error.pos}: the program "
                "ended before the trace was whole; record it again"
            ) from None
        except (RecursionError, ValueError) as error:
            raise CaptureError(
                f"{self._named}: not readable as JSON ({error}); needed a PyTorch profiler trace"
            ) from None

    def _parsed(self) -> Iterator[list[Row]]:
        opened = self._next()
        if opened == "[":
            yield from self._list()
            self._check_end()
            return
        seen = False
        if opened != "{":
            self._fail()
        while self._another("}"):
            key = self._value()
            if self._next() != ":":
                self._fail()
            if key == "traceEvents" and self._peek() == "[":
                if seen:
                    raise CaptureError(f"{self._named}: traceEvents is in it twice; record it again")
                self._next()
                seen = True
                yield from self._list()
            else:
                value = self._value()
                if key in _KEPT:
                    self.other[key] = value
        if not seen:
            raise CaptureError(
                f"{self._named}: JSON, but no trace (no traceEvents); needed what torch.profiler's export_chrome_trace "
                "writes"
            )
        self._check_end()

    def _check_end(self) -> None:
        """Check that nothing follows: of two traces in one file only the first would be read."""
        if more := self._peek():
            noun = "a second trace" if more in "{[" else "other text"
            raise CaptureError(
                f"{self._named}: {noun} begins at character {self._before + self._at}, after the end of the trace; "
                "needed one trace in a file: cut it there"
            )

    def _list(self) -> Iterator[list[Row]]:
        """The events of a list, after its opening bracket."""
        one_by_one_until = -1
        slow: list[Row] = []
        while self._another("]"):
            if self._before + self._at > one_by_one_until:
                rows, end = self._window()
                if rows is not None:
                    yield [*slow, *rows] if slow else rows
                    slow = []
                    continue
                one_by_one_until = end
            value = self._value()
            if isinstance(value, dict):
                slow.append(row_of(value))
            if len(slow) >= _BATCH:
                yield slow
                slow = []
        yield slow

    def _window(self) -> tuple[list[Row] | None, int]:
        """The complete events in the window; None and an end position if they must be decoded one by one."""
        if len(self._text) - self._at < _WINDOW:
            self._more()
        end = len(self._text)
        for _ in range(_TRIES):
            end = self._last_event(end)
            if end < 0:
                break
            try:
                # text that parses as a list has only complete events: a cut within an event would leave brackets open
                rows: list[Row] = self._decode(f"[{self._text[self._at : end]}]")
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue
            self._at = end
            return rows, 0
        return None, self._before + len(self._text)

    def _last_event(self, before: int) -> int:
        """Position after the last event that is probably followed by another; -1 if none."""
        while (opens := self._text.rfind("{", self._at, before)) > self._at:
            tail = self._text[max(opens - 64, self._at) : opens].rstrip()
            if tail.endswith(",") and (tail := tail[:-1].rstrip()).endswith("}"):
                return max(opens - 64, self._at) + len(tail)
            before = opens
        return -1

    def _another(self, end: str) -> bool:
        """Whether another value precedes the closing bracket."""
        while (mark := self._peek()) == ",":
            self._at += 1
        if mark in ("", end):
            self._next()
        return mark != end

    def _peek(self) -> str:
        """The next non-space character; '' at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _next(self) -> str:
        mark = self._peek()
        if not mark:
            self._fail()
        self._at += 1
        return mark

    def _value(self) -> Any:
        """Decode the value at the current position."""
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if len(self._text) - self._at > _LONGEST_VALUE or not self._more():
                    raise

    def _more(self) -> bool:
        """Read more of the file and drop consumed text; False at the end of the file."""
        added = "" if self._ended else self._file.read(max(_WINDOW, len(self._text) - self._at))
        self._ended = not added
        if added:
            self._text, self._before = self._text[self._at :] + added, self._before + self._at
            self._at = 0
        return bool(added)

    def _fail(self) -> None:
        raise json.JSONDecodeError("damaged", self._text, self._at)
