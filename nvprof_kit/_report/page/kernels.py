"""The kernel table of the page: calls and time by kernel, layer and phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Operations, op_owners
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._report.page.packing import Block
from nvprof_kit._report.page.timeline import Texts

if TYPE_CHECKING:
    import pandas as pd

MAX_KERNELS = 20_000
"""Maximum number of rows of all captures on a page; the costliest are kept."""


@dataclass(frozen=True)
class KernelTable:
    """The kernels of the shown steps.

    Attributes:
        rows: name, kernel_class, layer, phase, calls, total_ns, min_ns, max_ns; the costliest first.
    """

    rows: pd.DataFrame


def kernel_table(operations: Operations, is_counted: npt.NDArray[np.bool_]) -> KernelTable:
    """The operations by name, layer and phase.

    Args:
        operations: The operations, with names.
        is_counted: Which operations count.
    """
    import pandas as pd

    ops = operations.trace.ops
    chosen = np.flatnonzero(is_counted)
    layer, phase = op_owners(operations.attribution)
    names = ops["name"].cat
    codes = [column.codes.astype(np.int64)[chosen] for column in (layer, phase)]
    key = names.codes.to_numpy().astype(np.int64)[chosen]
    for code, column in zip(codes, (layer, phase), strict=True):
        key = key * (len(column.categories) + 1) + code
    group, _ = pd.factorize(key)
    groups = int(group.max(initial=-1)) + 1
    first = np.full(groups, len(chosen), dtype=np.int64)
    first[group[::-1]] = np.arange(len(chosen))[::-1]
    length = (ops["end_ns"].to_numpy() - ops["start_ns"].to_numpy())[chosen]
    shortest, longest = np.full(groups, np.iinfo(np.int64).max), np.zeros(groups, dtype=np.int64)
    np.minimum.at(shortest, group, length)
    np.maximum.at(longest, group, length)
    where = chosen[first]
    rows = pd.DataFrame(
        {
            "name": names.categories.to_numpy(dtype=object)[names.codes.to_numpy()[where]],
            "kernel_class": np.array(list(CLASSES), dtype=object)[operations.classes.code[where]],
            "layer": layer.categories.to_numpy(dtype=object)[layer.codes[where]],
            "phase": phase.categories.to_numpy(dtype=object)[phase.codes[where]],
            "calls": np.bincount(group, minlength=groups),
            "total_ns": exact_sums(group, length, groups),
            "min_ns": shortest,
            "max_ns": longest,
        }
    )
    return KernelTable(rows.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True))


def drawn_kernels(table: KernelTable, texts: Texts, block: Block, limit: int = MAX_KERNELS) -> dict[str, Any]:
    """The table as columns of a block, and a sentence about omissions."""
    rows, omitted = table.rows.iloc[:limit], table.rows.iloc[limit:]
    gone = omitted["total_ns"].sum() / max(int(table.rows["total_ns"].sum()), 1)
    note = f"{len(omitted):,} more rows, {100 * gone:.2f} % of the time, are not on the page" if len(omitted) else ""
    columns = {name: block.add(texts.of(rows[name])) for name in ("name", "kernel_class", "layer", "phase")}
    columns |= {name: block.add(rows[f"{name}_ns"]) for name in ("total", "min", "max")}
    return {**columns, "calls": block.add(rows["calls"]), "whole": int(table.rows["total_ns"].sum()), "note": note}
