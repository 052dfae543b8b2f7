"""Layer names of a capture for shell completion, without a full read."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, cast
from urllib.parse import quote

from nvprof_kit._trace.files.packed import UNREADABLE, unpack
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN, KNOWN_PHASES, LAYER_CATEGORIES, WINDOW, parse_range

_QUERY = """
WITH event AS (
  SELECT eventType, domainId, coalesce(event.text, string.value) AS text
  FROM NVTX_EVENTS AS event LEFT JOIN StringIds AS string ON string.id = event.textId
  WHERE eventType IN (59, 75)
)
SELECT DISTINCT text FROM event
WHERE eventType = 59 AND domainId IN (SELECT domainId FROM event WHERE eventType = 75 AND text = ?)
"""


_KINETO = re.compile(rb'"' + DOMAIN.encode() + rb':(?:forward|backward|recompute):([^"\\]+)"')
_PIECE, _MOST = 1 << 20, 1 << 26
"""Chunk size and maximum number of bytes read from a PyTorch trace, to keep completion fast."""


def layer_names(path: Path) -> list[str]:
    """Sorted module paths of the layers in a capture; empty if the file is unreadable or a report without an export.

    Args:
        path: An nsys ``.sqlite``, ``.nsys-rep`` or PyTorch trace, also compressed.
    """
    name = path.name.removesuffix(".xz")
    try:
        if name.endswith((".json", ".json.gz")):
            return sorted(_kineto_layers(path))
        if name.endswith(".nsys-rep"):
            return _exported_layers(path.with_name(name).with_suffix(".sqlite"))
        if path.suffix != ".xz":
            return _exported_layers(path)
        with tempfile.NamedTemporaryFile(suffix=".sqlite") as unpacked:
            unpack(path, Path(unpacked.name))
            return _exported_layers(Path(unpacked.name))
    except (*UNREADABLE, CaptureError):
        return []


def _kineto_layers(path: Path) -> set[str]:
    found: set[str] = set()
    rest, read = b"", 0
    with ExitStack() as files:
        stream: IO[bytes] = files.enter_context(path.open("rb"))
        for suffix in path.suffixes[::-1]:
            if suffix in (".xz", ".gz"):
                stream = files.enter_context(cast("IO[bytes]", (lzma if suffix == ".xz" else gzip).open(stream)))
        while read < _MOST and (piece := stream.read(_PIECE)):
            read += len(piece)
            text = rest + piece
            found.update(name.decode("utf-8", "replace") for name in _KINETO.findall(text))
            rest = text[text.rfind(b"\n") + 1 :][-4096:]
    return found


def _exported_layers(path: Path) -> list[str]:
    try:
        with closing(sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1", uri=True)) as db:
            return sorted(set(_layers(text for (text,) in db.execute(_QUERY, (DOMAIN,)))))
    except (sqlite3.Error, OSError):
        return []


def _layers(texts: Iterator[str | None]) -> Iterator[str]:
    for text in texts:
        if text and text not in KNOWN_PHASES and text != WINDOW:
            name = parse_range(text)
            if name.category in LAYER_CATEGORIES:
                yield name.text
