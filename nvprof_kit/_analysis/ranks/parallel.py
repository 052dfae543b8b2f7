"""The parallel groups of a job: which ranks share a communicator, and for which kind of parallelism.

The program's name for the group decides, if the capture has one (``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_dp``).
Otherwise its operations decide: sends between stages are pipeline parallel, all-to-all is expert parallel, reductions
in the forward pass are tensor parallel, and groups that only gather in the forward or reduce in the backward pass are
data parallel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nvprof_kit._result.column import Column, Columns
from nvprof_kit._trace.jobs.tables import JobTables
from nvprof_kit.names import Category

if TYPE_CHECKING:
    import pandas as pd

GROUP_COLUMNS: Columns = {
    "group": Column("the communicator", kind="str"),
    "name": Column("name that the program gave it, '' if unknown", kind="str"),
    "parallel": Column("data, tensor, pipeline, context, expert, or unknown", kind="str"),
    "told_by": Column("how it was recognized: `name`, or `use` (kinds of collectives and where they run)", kind="str"),
    "size": Column("number of ranks"),
    "ranks": Column("ranks with a capture", kind="str"),
    "kinds": Column("kinds of its collectives", kind="str"),
    "collectives": Column("number of collectives, summed over its ranks"),
}
"""The columns of the table of groups."""

_NAMES: Mapping[str, re.Pattern[str]] = {
    parallel: re.compile(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)", re.IGNORECASE)
    for parallel, words in {
        "expert": "expert|ep|etp|moe",
        "context": "context|cp|sequence|sp|ulysses|ring",
        "pipeline": "pipeline|pipe|pp|embedding",
        "tensor": "tensor|tp|model_parallel|mp",
        "data": "data|dp|fsdp|hsdp|ddp|shard|replicate|dp_shard|dp_replicate|zero",
    }.items()
}
_FORWARD = (Category.FORWARD.value, Category.RECOMPUTE.value)
_POINT_TO_POINT = {"Send", "Recv", "SendRecv"}
_LISTED = 16


def parallel_groups(
    tables: JobTables, stages: Mapping[int, int], name_of: Callable[..., str] = lambda _ranks, **_kind: ""
) -> pd.DataFrame:
    """The groups, with `GROUP_COLUMNS`.

    Args:
        tables: The job's maps, with separated communicators.
        stages: The pipeline stage of each rank.
        name_of: The program's name for a group without one, by its ranks
            (`nvprof_kit._analysis.ranks.listed.ListedGroups.name_of`).
    """
    import pandas as pd

    rows = []
    for _, mine in tables.uses().groupby("c", sort=False):
        ranks = sorted({int(rank) for listed in mine["ranks"] for rank in listed})
        name, kinds = str(mine["group"].max()), sorted(filter(None, set(mine["kind"])))
        name = name or name_of(ranks, passes_on=set(kinds) <= _POINT_TO_POINT)
        parallel, found_by = named_parallel(name), "name"
        if parallel == "unknown":
            parallel, found_by = used_parallel(mine, len({stages.get(rank, 0) for rank in ranks}) > 1), "use"
        size = max(int(mine["size"].max()), len(ranks))
        shown = ", ".join(map(str, ranks[:_LISTED])) + (", …" if len(ranks) > _LISTED else "")
        count = int(mine["collectives"].sum())
        rows.append((str(mine["comm"].iloc[0]), name, parallel, found_by, size, shown, ", ".join(kinds), count))
    frame: pd.DataFrame = pd.DataFrame.from_records(rows, columns=list(GROUP_COLUMNS))
    ordered: pd.DataFrame = frame.sort_values(["parallel", "group", "ranks"], kind="stable", ignore_index=True)
    return ordered


def named_parallel(name: str) -> str:
    """The kind of parallelism according to the group's name, ``unknown`` if the name does not say."""
    found = {parallel: match.start() for parallel, pattern in _NAMES.items() if (match := pattern.search(name))}
    return min(found, key=lambda parallel: found[parallel]) if found else "unknown"


def used_parallel(uses: pd.DataFrame, spans_stages: bool) -> str:
    """The kind of parallelism according to the group's operations.

    Args:
        uses: kind, phase and collectives of the group.
        spans_stages: Whether its ranks are in several pipeline stages.
    """
    kinds = set(uses["kind"])
    forward = set(uses[uses["phase"].isin(_FORWARD)]["kind"])
    if kinds & _POINT_TO_POINT and not kinds & {"ReduceScatter", "AllGather"}:
        return "pipeline" if spans_stages else "context" if forward & _POINT_TO_POINT else "unknown"
    if "AllToAll" in kinds:
        return "expert"
    if forward & {"AllReduce", "ReduceScatter"}:
        return "tensor"
    return "data" if kinds & {"AllReduce", "ReduceScatter", "AllGather", "Broadcast"} else "unknown"
