"""Files of `nvprof_kit.count_flops` as tables: the operations of a step by range."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit._trace.schema import Column, read_tables
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import FLOPS_FORMAT, FLOPS_VERSION

if TYPE_CHECKING:
    import pandas as pd

TABLES = read_tables("nvprof_kit._trace", "flops.toml")
"""The tables of a `FlopsFile`, and their columns."""

_DEEPEST = 500
_SUFFIXES = re.compile(r"(\.(sqlite|nsys-rep|json|json\.gz)|_pqtdir)?(\.xz)?$")


@dataclass(frozen=True)
class FlopsFile:
    """The counted operations.

    Attributes:
        path: The file.
        steps: Number of counted steps; 0 if the program marks no steps.
        gpu: Name of the GPU that ran the operators; '' without a GPU.
        torch: The PyTorch version that supplied the FLOP formulas.
        ranges, operators, unknown: Its tables; columns `TABLES`.
    """

    path: str
    steps: int
    gpu: str
    torch: str
    ranges: pd.DataFrame
    operators: pd.DataFrame
    unknown: pd.DataFrame


def read_flops(path: str | Path) -> FlopsFile:
    """Read a file written by `nvprof_kit.count_flops`.

    Raises:
        CaptureError: The file cannot be read, has another format or a later version, or is damaged.
    """
    data = _json(Path(path))
    if not isinstance(data, dict) or data.get("format") != FLOPS_FORMAT:
        raise CaptureError(f"{path}: not a file of nvprof_kit.count_flops (its format is not {FLOPS_FORMAT!r})")
    if data.get("version") != FLOPS_VERSION:
        raise CaptureError.of("counts-version", path=path, version=data.get("version"), supported=FLOPS_VERSION)
    try:
        return _tables(str(path), data)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CaptureError(f"{path}: damaged: {type(error).__name__}: {error}; count again") from None


def flops_beside(capture: str | Path) -> Path:
    """The file of counts next to a capture, from `find_flops`.

    Raises:
        CaptureError: There is no such file.
    """
    if path := find_flops(capture):
        return path
    if not Path(capture).exists():
        raise CaptureError(f"{capture}: no such file")
    name = f"{_SUFFIXES.sub('', Path(capture).name)}.flops.json"
    raise CaptureError.of("no-counts", capture=capture, name=name)


def find_flops(capture: str | Path) -> Path | None:
    """The file of counts next to a capture: ``run.flops.json`` for ``run.sqlite`` and its window ``run.1.sqlite``.
    Otherwise, for a capture with ``rank3`` in its name, the only ``*.rank3.flops.json`` in the folder.
    """
    capture = Path(capture)
    name = _SUFFIXES.sub("", capture.name)
    tried = [capture.with_name(f"{stem}.flops.json") for stem in dict.fromkeys((name, re.sub(r"\.\d+$", "", name)))]
    if of_rank := re.search(r"rank(\d+)", name):
        tried.append(capture.with_name(f"{name}.rank{of_rank[1]}.flops.json"))
        matches = sorted(capture.parent.glob(f"*.rank{of_rank[1]}.flops.json"))
        tried += matches if len(matches) == 1 else []
    else:  # of several ranks in one capture the first
        tried.append(capture.with_name(f"{name}.rank0.flops.json"))
    return next((path for path in tried if path.exists()), None)


def flops_of_rank(named: str | Path, capture: str | Path) -> Path:
    """The file of counts given by the user; if only per-rank files exist, the one for the capture's rank."""
    path, of_rank = Path(named), re.search(r"rank(\d+)", Path(capture).name)
    if of_rank and not path.exists():
        tail = ".flops.json" if path.name.endswith(".flops.json") else path.suffix
        ranked = path.with_name(f"{path.name.removesuffix(tail)}.rank{of_rank[1]}{tail}")
        return ranked if ranked.exists() else path
    return path


def _json(path: Path) -> Any:
    try:
        return json.loads(read_packed(path))
    except FileNotFoundError:
        raise CaptureError(f"{path}: no such file") from None
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CaptureError(f"{path}: not JSON; needed a file of nvprof_kit.count_flops") from None


def _tables(path: str, content: dict[str, Any]) -> FlopsFile:
    ranges, operators, unknown = (_frame(content, table, columns) for table, columns in TABLES.items())
    depths: list[int] = []
    for number, parent in enumerate(ranges["inside"].tolist()):
        if not -1 <= parent < number:
            raise ValueError(f"range {number} is inside {parent}, which does not come before it")
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if depths[-1] > _DEEPEST:
            raise ValueError(f"range {number} is inside more than {_DEEPEST} others")
    if missing := [number for number in (*operators["range"], *unknown["range"]) if number >= len(ranges)]:
        raise ValueError(f"there is no range {missing[0]}")
    steps, gpu, torch = (_cell(content, *cell) for cell in (("steps", "int64"), ("gpu", "object"), ("torch", "object")))
    return FlopsFile(path, steps, gpu, torch, ranges, operators, unknown)


def _frame(content: dict[str, Any], table: str, columns: Mapping[str, Column]) -> pd.DataFrame:
    """A table of a file."""
    import numpy as np
    import pandas as pd

    rows = content[table]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{table} is not a list of objects")
    return pd.DataFrame(
        {name: np.array([_cell(row, name, dtype) for row in rows], dtype) for name, (dtype, *_) in columns.items()}
    )


def _cell(row: dict[str, Any], name: str, dtype: str) -> Any:
    """A text or a whole number; -1 for a range at the top."""
    value = row[name]
    if name == "inside" and value is None:
        return -1
    if dtype == "object" and not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} is not a text")
    if dtype != "object" and (type(value) is not int or value < 0):
        raise ValueError(f"{name} = {value!r} is not an integer >= 0")
    return value
