"""Display of folded equal blocks: one line with their number, and the time of one block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    import pandas as pd

from nvprof_kit._report.text.table.units import Milliseconds

_FOLDED = r" x\d+$"
EACH = ("median", "min", "max")
COLUMNS = (*EACH, "unlike")
RANKS = dict.fromkeys(EACH, 2) | {"unlike": 1}
KINDS = {"unlike": "words"}


def path_label(row: Mapping[Any, Any]) -> str:
    """A layer's path, and the number of folded blocks."""
    return f"{row['layer']} x{row['count']}" if row.get("count", 1) > 1 else str(row["layer"])


def fold_cells(row: Mapping[Any, Any], ms: Milliseconds) -> dict[str, str]:
    """The time of one of the equal blocks, or how a block differs from its equals."""
    each = {name: ms(row[f"{name}_ns"]) for name in EACH} if row.get("count", 1) > 1 else {}
    return each | ({"unlike": row["unlike"]} if row.get("unlike") else {})


def fold_columns(lines: Iterable[Mapping[str, str]]) -> list[str]:
    """The non-empty columns of `fold_cells`."""
    used = {name for line in lines for name in COLUMNS if line.get(name)}
    return [name for name in COLUMNS if name in used]


def ranked_notes(tables: Iterable[pd.DataFrame]) -> list[Text]:
    """A note about folded rows of `nvprof_kit._analysis.layers.fold_ranked.fold_ranked`, if there are any."""
    if not any("unlike" in one and "layer" in one and one["layer"].astype(str).str.contains(_FOLDED).any()
               for one in tables):  # fmt: skip
        return []
    return [
        Text(
            "xN: equal blocks in one line with their sums; median, min and max are of one of them. --no-fold prints "
            "one line per block.",
            "dim",
        )
    ]


def fold_notes(columns: Iterable[str], figures: str, each: str) -> list[Text]:
    """A note about folded lines, if there are any.

    Args:
        columns: The table's columns.
        figures: The meaning of the figures of a folded line.
        each: The meaning of median, min and max.
    """
    if "median" not in columns:
        return []
    return [
        Text(
            f"xN: equal blocks in one line; figures are {figures}; median, min and max are {each}. --no-fold prints "
            "one line per block.",
            "dim",
        )
    ]
