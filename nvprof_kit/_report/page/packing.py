"""Columns of numbers as the page holds them: the smallest type that fits, starts as differences, all packed together.

A column is ``[type, offset, count, scale]`` into one block of bytes: ``type`` is ``u1``, ``u2``, ``u4`` or ``f8``
(little-endian), and ``scale`` 1 where its values are to be summed up to give the column. The block is gzip in base64;
`core.js` unpacks it.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
import numpy.typing as npt

Column = list[Any]
"""Where a column lies: type, offset in bytes, number of values, and whether they are differences."""

_SMALL = ("u1", "u2", "u4")


class Block:
    """The columns of one part of the page."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, values: npt.ArrayLike, *, rising: bool = False) -> Column:
        """Put a column in.

        Args:
            values: Whole numbers up to 2^53, or any numbers.
            rising: Whether they never fall: their differences are smaller.
        """
        column = np.asarray(values)
        count = len(column)
        if rising and count:
            column = np.diff(column, prepend=column.dtype.type(0))
        kind = _kind(column)
        data = column.astype(f"<{kind}").tobytes()
        place = [kind, self._size, count, int(rising)]
        padded = data + bytes(-len(data) % 8)
        self._pieces.append(padded)
        self._size += len(padded)
        return place

    def packed(self) -> str:
        """The block as text."""
        return base64.b64encode(gzip.compress(b"".join(self._pieces), compresslevel=6, mtime=0)).decode()


def _kind(column: npt.NDArray[Any]) -> str:
    """The smallest type that holds a column."""
    if not len(column):
        return "u1"
    if column.dtype.kind not in "iub" or int(column.min()) < 0:
        return "f8"
    most = int(column.max())
    return next((kind for kind in _SMALL if most <= np.iinfo(kind).max), "f8")
