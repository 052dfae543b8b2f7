"""The data in a page of `nvprof-kit report` or `ranks`, read as the page's own script reads it."""

import base64
import gzip
import json
import re
from typing import Any

import numpy as np


def data_of(page: bytes) -> dict[str, Any]:
    """The data of the page's first capture, or of its job."""
    found = re.search('<script type="application/json" id="data">(.*?)</script>', page.decode(), re.DOTALL)
    assert found
    return json.loads(found[1])[0]


def column(data: dict[str, Any], place: list[Any]) -> np.ndarray:
    """A packed column: its type, where it begins, its length, and whether it holds differences."""
    kind, offset, count, rising = place
    values = np.frombuffer(gzip.decompress(base64.b64decode(data["block"])), f"<{kind}", count, offset)
    return np.cumsum(values, dtype=np.float64) if rising else values


def unpacked(data: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The same with each packed column as a list."""
    kinds = ("u1", "u2", "u4", "f8")
    return {
        name: [int(cell) for cell in column(data, value)]
        if isinstance(value, list) and len(value) == 4 and value[0] in kinds
        else value
        for name, value in columns.items()
    }
