"""Packs columns of numbers for the page: smallest possible type, delta encoding for rising values, compression.

A column is ``[type, offset, count, scale]`` into one block of bytes: ``type`` is ``u1``, ``u2``, ``u4`` or ``f8``
(little-endian); ``scale`` is 1 if the values are differences to be summed. The block is gzip in base64; `core.js`
unpacks it.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
import numpy.typing as npt

Column = list[Any]
"""Position of a column: type, offset in bytes, number of values, and whether they are differences."""

_SMALL = ("u1", "u2", "u4")


class Block:
    """The columns of one part of the page."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, values: npt.ArrayLike, *, rising: bool = False) -> Column:
        """Add a column.

        Args:
            values: Integers up to 2^53, or floats.
            rising: Whether the values never decrease; then their differences are stored.
        """
        column = np.asarray(values)
        count = len(column)
        if rising and count:
            column = np.diff(column, prepend=column.dtype.type(0))
        kind = _kind(column)
        data = column.astype(f"<{kind}").tobytes()
        entry = [kind, self._size, count, int(rising)]
        padded = data + bytes(-len(data) % 8)
        self._pieces.append(padded)
        self._size += len(padded)
        return entry

    def packed(self) -> str:
        """The block as base64."""
        return base64.b64encode(gzip.compress(b"".join(self._pieces), compresslevel=6, mtime=0)).decode()


def _kind(column: npt.NDArray[Any]) -> str:
    """The smallest type for the values of a column."""
    if not len(column):
        return "u1"
    if column.dtype.kind not in "iub" or int(column.min()) < 0:
        return "f8"
    largest = int(column.max())
    return next((kind for kind in _SMALL if largest <= np.iinfo(kind).max), "f8")
