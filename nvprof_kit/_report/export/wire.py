"""Protocol buffer wire format: single messages, and many messages of the same layout at once.

Many similar messages are written as rows of a byte matrix. Their numbers are varints of a fixed width, padded with zero
bits, which all parsers accept. So all rows have the same length, and NumPy writes them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_VARINT, _BYTES = 0, 2


def varint(value: int) -> bytes:
    """Encode an integer; a negative one as 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    """Encode an integer field."""
    return varint(field << 3 | _VARINT) + varint(value)


def text(field: int, value: str | bytes) -> bytes:
    """Encode a field with text, bytes or a message; lone surrogates become ``?``."""
    raw = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return varint(field << 3 | _BYTES) + varint(len(raw)) + raw


def packed(field: int, values: Sequence[int]) -> bytes:
    """Encode a packed repeated integer field."""
    return text(field, b"".join(map(varint, values)))


class Column(NamedTuple):
    """A number per row, with its width in bytes."""

    values: npt.NDArray[np.integer[Any]]
    width: int


Part = bytes | Column
"""Bytes shared by all rows, or a number per row."""


def numbers(field: int, values: npt.NDArray[np.integer[Any]]) -> list[Part]:
    """Encode an integer field per row."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    width = 10 if low < 0 else max(1, -(-high.bit_length() // 7))
    return [varint(field << 3 | _VARINT), Column(values, width)]


def message(field: int, parts: Sequence[Part]) -> list[Part]:
    """Encode a message field per row."""
    width = sum(one.width if isinstance(one, Column) else len(one) for one in parts)
    return [varint(field << 3 | _BYTES) + varint(width), *parts]


def rows(parts: Sequence[Part], count: int) -> bytes:
    """The concatenated rows."""
    width = sum(one.width if isinstance(one, Column) else len(one) for one in parts)
    matrix = np.empty((width, count), dtype=np.uint8)
    at = 0
    for part in parts:
        if isinstance(part, Column):
            _fill(matrix[at : at + part.width], part)
            at += part.width
        else:
            matrix[at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)[:, None]
            at += len(part)
    data: bytes = matrix.T.tobytes()
    return data


def _fill(into: npt.NDArray[np.uint8], column: Column) -> None:
    """Write varints: seven bits per byte, lowest first; the high bit of a byte says that another one follows."""
    rest = column.values.astype(np.int64).view(np.uint64)
    for place in range(column.width):
        into[place] = (rest & np.uint64(0x7F)).astype(np.uint8)
        if place + 1 < column.width:
            into[place] |= 0x80
            rest = rest >> np.uint64(7)
