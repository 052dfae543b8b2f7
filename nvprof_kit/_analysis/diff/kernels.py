"""Compare the kernels of two programs: which are new, gone, renamed, or launched a different number of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._result.column import Column, Columns

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.diff.samples import StepSums

KERNEL_COLUMNS: Columns = {
    "what": Column("`new`, `gone`, `renamed`, or `launches` if the number of launches differs", kind="str"),
    "name": Column("name of the kernel; in BASE if it is gone or renamed", kind="str"),
    "now": Column("its name in NEW if it is renamed", kind="str"),
    "kernel_class": Column("its class", kind="str"),
    "count": Column("launches per step, in BASE unless it is new", kind="float"),
    "base_ns": Column("time per step in BASE", "ns"),
    "new_ns": Column("time per step in NEW", "ns"),
    "base_count": Column("launches per step in BASE", kind="float"),
    "new_count": Column("launches per step in NEW", kind="float"),
}
"""The columns of `nvprof_kit._analysis.diff.diff.Diff.kernels`."""

_SAME_COUNT = 1e-9


def compared_kernels(before: Sequence[StepSums], after: Sequence[StepSums]) -> tuple[pd.DataFrame, tuple[float, float]]:
    """What changed about the kernels, with `KERNEL_COLUMNS`, the costliest first, and kernels per step of each side."""
    base, new = (_mean([sums.kernels for sums in side]) for side in (before, after))
    return _compared(base, new), (float(base["count"].sum()), float(new["count"].sum()))


def _mean(runs: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The kernels, averaged over the runs."""
    import pandas as pd

    if len(runs) == 1:
        return runs[0]
    rows = pd.concat(runs, ignore_index=True)
    how = {"kernel_class": "first", "count": "sum", "gpu_ns": "sum", "where": "first"}
    means: pd.DataFrame = rows.groupby("name", sort=False).agg(how).reset_index()
    for column in ("count", "gpu_ns"):
        means[column] /= len(runs)
    return means


def _compared(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Kernels that only one side has, paired as renamed if they do the same work, and those whose count changed."""
    import pandas as pd

    gone, added = (
        side[~side["name"].isin(other["name"])].sort_values("gpu_ns", ascending=False, kind="stable")
        for side, other in ((before, after), (after, before))
    )
    left: list[dict[Any, Any]] = added.to_dict("records")
    none = {"name": "", "count": 0.0, "gpu_ns": 0.0}
    rows = []
    for old in gone.to_dict("records"):
        same = next((kernel for kernel in left if _same_work(old, kernel)), None)
        if same is not None:
            left.remove(same)
        rows.append(_row("renamed" if same else "gone", old, same or none))
    rows += [
        _row("new", none | {"name": kernel["name"], "kernel_class": kernel["kernel_class"]}, kernel) for kernel in left
    ]
    both = before.merge(after, on="name", suffixes=("", "_new"))
    changed = both[(both["count"] - both["count_new"]).abs() > _SAME_COUNT]
    rows += [
        _row("launches", kernel, {"name": "", "count": kernel["count_new"], "gpu_ns": kernel["gpu_ns_new"]})
        for kernel in changed.to_dict("records")
    ]
    table = pd.DataFrame(rows, columns=list(KERNEL_COLUMNS)).astype({"base_ns": "int64", "new_ns": "int64"})
    order = np.argsort(-table[["base_ns", "new_ns"]].max(axis=1).to_numpy(), kind="stable")
    frame: pd.DataFrame = table.iloc[order].reset_index(drop=True)
    return frame


def _row(kind: str, old: dict[Any, Any], now: dict[Any, Any]) -> tuple[Any, ...]:
    name = now["name"] if kind == "renamed" else ""
    count = now["count"] if kind == "new" else old["count"]
    time_ns = (old["gpu_ns"], now["gpu_ns"])
    return (kind, old["name"], name, old["kernel_class"], count, *time_ns, old["count"], now["count"])


def _same_work(first: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two kernels are of one class and run as often per step in as many places."""
    places = [(row["kernel_class"], row["where"][0], row["where"][2]) for row in (first, other)]
    return places[0] == places[1]
