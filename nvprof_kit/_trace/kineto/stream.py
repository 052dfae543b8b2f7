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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from nvprof_kit._toml import read_toml
from nvprof_kit._trace.files.packed import GZIP, Bounded, room_for
from nvprof_kit.errors import CaptureError

_WINDOW = 4 << 20
_LONGEST_VALUE = 64 << 20
"""Longer than any event; text that cannot be decoded within it is damaged."""
_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r'(\n[ \t]*"name": ")([^"\\\n]*(?:\\.[^"\\\n]*)*"(?! *, *"[^"\n]*" *:).*)(?=",?\n)')
"""A line with nothing but a name in which there is a quote without a backslash."""
_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)"')
_BETWEEN_EVENTS = re.compile(r"\}\s*,\s*$")
_CUT = re.compile(r".{0,15}[^\]}]")
"""What is left of a number, a word or a name that is cut off."""
_DECODER = json.JSONDecoder(strict=False)
_OTHER = ("schemaVersion", "deviceProperties")
_TRIES = 4
_BATCH = 10_000

NAMES = read_toml("nvprof_kit._trace.kineto", "names.toml")
"""What Kineto and PyTorch call the events of a trace and what is in them."""

ARGUMENTS: Mapping[str, str] = read_toml("nvprof_kit._trace", "sources.toml")["kineto_arguments"]
"""The arguments that are read of an event, of any type, and their keys in the file."""
_INPUTS = {"dims": "Input Dims", "types": "Input type", "concrete": "Concrete Inputs", "strides": "Input Strides"}
_TEXTS, _VALUES = ("ph", "cat"), ("name", "pid", "tid", "ts", "dur", "id")

Args: Any = msgspec.defstruct(
    "Args",
    [*((name, Any, None) for name in ARGUMENTS), *((name, msgspec.Raw, msgspec.Raw(b"null")) for name in _INPUTS)],
    rename={**ARGUMENTS, **_INPUTS},
    gc=False,
)
"""The arguments of an event, those with the inputs of an operator as JSON text."""
Row: Any = msgspec.defstruct(
    "Row",
    [
        *((name, str | None, None) for name in _TEXTS),
        *((name, Any, None) for name in _VALUES),
        ("args", Args | None, None),
    ],
    gc=False,
)
"""An event with the fields that are read."""
UNREADABLE = Args()
"""The arguments of an event if ``args`` is not an object."""


def inputs_of(args: Any) -> bytes:
    """JSON text with the inputs of an operator: a list of its shapes, types, values and strides."""
    return b"[%s]" % b",".join(bytes(getattr(args, name)) for name in _INPUTS)


def _row_of(event: dict[str, Any]) -> Any:
    """Convert an event decoded by the standard library, with values of any type."""
    arguments = event.get("args")
    args = None if arguments is None else UNREADABLE
    if isinstance(arguments, dict):
        inputs = {name: msgspec.Raw(json.dumps(arguments.get(key)).encode()) for name, key in _INPUTS.items()}
        args = Args(**{name: arguments.get(key) for name, key in ARGUMENTS.items()}, **inputs)
    texts = {key: event[key] for key in _TEXTS if isinstance(event.get(key), str)}
    return Row(**texts, **{key: event.get(key) for key in _VALUES}, args=args)


_decode = msgspec.json.Decoder(list[Row]).decode


class TraceFile:
    """A trace file, plain or gzipped; its events are read once, in file order.

    Args:
        path: The file.
        named: The path to name in messages.

    Attributes:
        other: Top-level values besides the events; complete after all events are read.
    """

    def __init__(self, path: Path, named: Path) -> None:
        self.other: dict[str, Any] = {}
        self._path, self._named = path, named
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    def batches(self) -> Iterator[list[Any]]:
        """The events of ``traceEvents`` or of a top-level list, a few thousand at a time.

        Raises:
            CaptureError: The file is truncated, damaged, not JSON, or not a trace.
        """
        try:
            with self._path.open("rb") as file:
                packed = file.read(2) == GZIP
                file.seek(0)
                raw = cast("IO[bytes]", gzip.open(file) if packed else file)  # noqa: SIM115  # the file is closed below
                limit = room_for(self._path.stat().st_size) if packed else None
                buffered = io.BufferedReader(Bounded(raw, limit, self._named), _WINDOW)
                self._file = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="replace")
                yield from self._trace()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise CaptureError.of("damaged-gzip", path=self._named) from None
        except json.JSONDecodeError as error:
            at, after = self._before + error.pos, error.doc[error.pos :].strip()
            is_cut = not after or error.msg.startswith("Unterminated") or (at and _CUT.fullmatch(after))
            code = "json:cut" if is_cut else "json:damaged"
            raise CaptureError.of(code, path=self._named, character=at, text=after[:40]) from None
        except (RecursionError, ValueError) as error:
            raise CaptureError.of("not-json", path=self._named, error=error) from None

    def _trace(self) -> Iterator[list[Any]]:
        opening = self._next("[{")
        if opening == "[":
            yield from self._events()
        has_events = False
        while opening == "{" and self._has_another("}"):
            key = self._value()
            self._next(":")
            if key == "traceEvents" and self._peek() == "[":
                if has_events:
                    raise CaptureError(f"{self._named}: traceEvents is in it twice; record it again")
                has_events = True
                self._next("[")
                yield from self._events()
            else:
                value = self._value()
                self.other |= {key: value} if key in _OTHER else {}
        if opening == "{" and not has_events:
            raise CaptureError.of("no-trace-events", path=self._named)
        if self._peek():
            # of two traces in one file only the first would be read
            raise CaptureError.of("more-after-trace", path=self._named, character=self._before + self._at)

    def _events(self) -> Iterator[list[Any]]:
        """The events of a list, after its opening bracket."""
        slow_until = -1
        slow: list[Any] = []
        while self._has_another("]"):
            if self._before + self._at > slow_until:
                if (rows := self._window()) is not None:
                    yield [*slow, *rows] if slow else rows
                    slow = []
                    continue
                if self._escape():
                    continue
                slow_until = self._before + len(self._text)
            value = self._value()
            if isinstance(value, dict):
                slow.append(_row_of(value))
            if len(slow) >= _BATCH:
                yield slow
                slow = []
        yield slow

    def _window(self) -> list[Any] | None:
        """The complete events in the window; None if its events must be decoded one by one."""
        if len(self._text) - self._at < _WINDOW:
            self._read_more()
        end = len(self._text)
        for _ in range(_TRIES):
            # text that parses as a list has only complete events: a cut within an event would leave brackets open
            ends = None
            while ends is None and (end := self._text.rfind("{", self._at, end)) > self._at:
                ends = _BETWEEN_EVENTS.search(self._text, max(end - 64, self._at), end)
            if ends is None:
                return None
            try:
                rows: list[Any] = _decode(f"[{self._text[self._at : ends.start() + 1]}]")
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue
            self._at = ends.start() + 1
            return rows
        return None

    def _has_another(self, end: str) -> bool:
        """Whether another value precedes the closing bracket, which is passed."""
        while (mark := self._peek()) == ",":
            self._at += 1
        if mark in ("", end):
            self._next(end)
        return mark != end

    def _peek(self) -> str:
        """The next non-space character; '' at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _next(self, expected: str) -> str:
        """Pass one of these characters."""
        mark = self._peek()
        if not mark or mark not in expected:
            raise json.JSONDecodeError("damaged", self._text, self._at)
        self._at += 1
        return mark

    def _value(self) -> Any:
        """Decode the value at the current position."""
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._read_more():  # a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if self._escape():
                    continue
                if len(self._text) - self._at > _LONGEST_VALUE or not self._read_more():
                    raise

    def _escape(self) -> bool:
        """Escape the quotes in names of Python functions, which PyTorch does not; False if there are none."""

        def escape(line: re.Match[str]) -> str:
            key, name = line.groups()
            return key + (_QUOTE.sub(r'\1\\"', name) if "\\" in name else name.replace('"', '\\"'))

        escaped, names = _NAME.subn(escape, self._text[self._at :])
        if names:
            self._text = self._text[: self._at] + escaped
        return bool(names)

    def _read_more(self) -> bool:
        """Read more of the file and drop consumed text; False at the end of the file."""
        added = "" if self._ended else self._file.read(max(_WINDOW, len(self._text) - self._at))
        self._ended = not added
        if added:
            self._text, self._before = self._text[self._at :] + added, self._before + self._at
            self._at = 0
        return bool(added)
