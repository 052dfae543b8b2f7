"""The JSON of a trace, event by event: neither its text nor its events are ever held as a whole.

The standard library's decoder reads one event at a time from a window of the file. It is as fast as reading all at
once, and needs no copy of a text that may be larger than the machine's memory.
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

from nvprof_kit._trace.packed import Bounded, room_for
from nvprof_kit.errors import CaptureError

_WINDOW = 4 << 20
_LONGEST_VALUE = 64 << 20
"""No event is as long; what cannot be read within it is damaged."""
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(strict=False)
_KEPT = ("schemaVersion", "deviceProperties")


class TraceFile:
    """A trace whose events are read once, in the file's order.

    Args:
        path: The file, plain or gzipped.
        named: The path to name in messages.

    Attributes:
        other: What the file says besides the events, whole once these are read.
    """

    def __init__(self, path: Path, named: Path) -> None:
        self.other: dict[str, Any] = {}
        self._path, self._named = path, named
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    def events(self) -> Iterator[Any]:
        """The events of ``traceEvents``, or of a file that is a bare list.

        Raises:
            CaptureError: The file is cut off, damaged, no JSON, or no trace.
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

    def _parsed(self) -> Iterator[Any]:
        opened = self._next()
        if opened == "[":
            yield from self._list()
            return
        seen = False
        if opened != "{":
            self._fail()
        while self._another("}"):
            key = self._value()
            if self._next() != ":":
                self._fail()
            if key == "traceEvents" and self._peek() == "[":
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

    def _list(self) -> Iterator[Any]:
        """The values of a list whose bracket is read already."""
        while self._another("]"):
            yield self._value()

    def _another(self, end: str) -> bool:
        """Whether another value comes before the mark that ends them."""
        while (mark := self._peek()) == ",":
            self._at += 1
        if mark in ("", end):
            self._next()
        return mark != end

    def _peek(self) -> str:
        """The next mark, '' at the end of the file."""
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
        """The value that begins here."""
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
        """Read on, and let go of what was read; False at the end of the file."""
        added = "" if self._ended else self._file.read(max(_WINDOW, len(self._text) - self._at))
        self._ended = not added
        if added:
            self._text, self._before = self._text[self._at :] + added, self._before + self._at
            self._at = 0
        return bool(added)

    def _fail(self) -> None:
        raise json.JSONDecodeError("damaged", self._text, self._at)
