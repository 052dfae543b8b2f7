"""The communication kernels of a rank: communicator, kind, and the numbers that match them across ranks."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array
from nvprof_kit._analysis.breakdown.host import HostCalls
from nvprof_kit._analysis.breakdown.transfers import kernels_of_calls, messages
from nvprof_kit._trace.schema import Trace

_KINDS = (
    "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "SendRecv", "AllToAll", "Reduce", "Send", "Recv", "Barrier",
)  # fmt: skip
_KIND = re.compile("|".join(re.sub("(?<=.)(?=[A-Z])", "_?", kind) for kind in _KINDS), re.IGNORECASE)
_POINT_TO_POINT = ("Send", "Recv", "SendRecv")
PASSING = r" \d+ <-> (?:\d+|several)$"
"""What a communicator's name has, as a regular expression, if it stands for the messages between two ranks."""


def kind_of(name: str) -> str:
    """``AllReduce`` of ``ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)``; '' if the name does not say."""
    match = _KIND.search(name)
    text = match[0].lower().replace("_", "") if match else ""
    return next((kind for kind in _KINDS if kind.lower() == text), "")


def communications(
    trace: Trace, host: HostCalls, rows: Int64Array, is_comm: Bools, *, launch: Int64Array, step: Int64Array, rank: int
) -> tuple[Int64Array, pd.DataFrame]:
    """The communication kernels of a rank by launch: their indices among its operations, and their columns.

    Args:
        trace: The capture with ``name``, ``stream`` and, if available, ``collectives``.
        host: Its calls.
        rows: Its operations, as rows of `Trace.ops`, shape ``(n,)``.
        is_comm: Which of them communicate.
        launch: Their launch times.
        step: Step of each, `NONE` outside.
        rank: The rank.
    """
    comm_ops = np.flatnonzero(is_comm)
    comm_ops = comm_ops[np.lexsort((trace.ops["start_ns"].to_numpy()[rows[comm_ops]], launch[comm_ops]))]
    ops = rows[comm_ops]
    owner = kernels_of_calls(trace, ops)
    size, group_size = messages(trace, ops, owner)
    calls = _calls(trace, owner, len(ops))
    kind = _kinds(trace, host, ops)
    kind = np.where(np.isin(kind, ("SendRecv", "")) & (calls["kind"] != ""), calls["kind"], kind)
    # by first use
    stream = pd.factorize(trace.ops["stream"].to_numpy()[ops])[0]
    streams = np.array([f"stream {number}" for number in range(int(stream.max(initial=-1)) + 1)], dtype=object)[stream]
    partners, direction = _passing(rank, calls, owner, trace)
    comm = np.where(calls["communicator"] != "", calls["communicator"], streams) + partners
    # a communicator with duplicates counts something else
    sequence = pd.DataFrame({"comm": comm, "sequence": calls["sequence"]})
    duplicated = sequence.duplicated() & (sequence["sequence"] >= 0)
    is_numbered = (partners == "") & ~np.isin(comm, comm[duplicated])
    table = pd.DataFrame(
        {
            "index": np.arange(len(ops)),
            "comm": comm,
            "stream": stream,
            "group": calls["group"],
            "operation": calls["operation"],
            "sequence": np.where(is_numbered, calls["sequence"], NONE),
            "step": step[comm_ops],
            "kind": kind,
            "bytes": size,
            "size": group_size,
        }
    )
    table["number"] = 3 * table.groupby(["comm", "step", direction]).cumcount() + direction
    collective_rows = partners == ""
    table.loc[collective_rows, "number"] = table[collective_rows].groupby(["comm", "step"]).cumcount()
    return comm_ops, table


def _kinds(trace: Trace, host: HostCalls, ops: Int64Array) -> npt.NDArray[Any]:
    """The kind of each of some operations by its name, or by the ``c10d`` operator around its launch: the kernels of an
    all-to-all are sends and receives by name, but none of its ranks can end before all have arrived.
    """
    name = trace.ops["name"].cat
    codes, codes_of_ops = np.unique(name.codes.to_numpy()[ops], return_inverse=True)
    kinds = [kind_of(str(name.categories[code])) if code >= 0 else "" for code in codes.tolist()]
    kind_of_ops: npt.NDArray[Any] = np.array(kinds, dtype=object)[codes_of_ops]
    # the innermost such operator that is open at the launch
    names = np.array([kind_of(name) if name.startswith("c10d::") else "" for name in host.names], dtype=object)
    operators = np.flatnonzero((names[host.name] != "") & host.operator)
    call, is_vague = host.of_op[ops], np.isin(kind_of_ops, ("SendRecv", ""))
    kernels = np.flatnonzero((call != NONE) & is_vague)
    launches, opened = (
        pd.DataFrame({"tid": host.tid[calls], name: index}, index=pd.Index(host.start[calls], name="start"))
        for name, calls, index in (("kernel", call[kernels], kernels), ("operator", operators, operators))
    )
    launches, opened = (calls.sort_index(kind="stable").reset_index() for calls in (launches, opened))
    latest = pd.merge_asof(launches, opened, on="start", by="tid")
    latest = latest[latest["operator"].notna()].astype({"operator": "int64"})
    inside = latest[latest["start"] < host.end[latest["operator"]]]
    kind_of_ops[inside["kernel"]] = names[host.name[inside["operator"]]]
    return kind_of_ops


def _calls(trace: Trace, owner: Int64Array, kernels: int) -> pd.DataFrame:
    """Values from the calls of each kernel, by kernel: kind (`SendRecv` if its calls differ), communicator, group,
    sequence, operation; '' and `NONE` without a call.
    """
    values: dict[str, Any] = {"kind": "", "communicator": "", "group": "", "sequence": NONE, "operation": NONE}
    table: pd.DataFrame = pd.DataFrame(values, index=pd.RangeIndex(kernels))
    if trace.collectives is None or not (owner >= 0).any():
        return table
    calls = trace.collectives.assign(kernel=owner)[owner >= 0]
    calls["kind"] = calls["call"].map({name: kind_of(name) for name in calls["call"].cat.categories}).astype(object)
    of_kernel = calls[calls["kind"] != ""].groupby("kernel")["kind"]
    columns = {"kind": of_kernel.first().where(of_kernel.nunique() == 1, "SendRecv")}
    if "communicator" in calls:
        columns |= {name: calls.groupby("kernel")[name].last() for name in ("communicator", "sequence")}
    if "description" in calls:
        columns["group"] = calls.groupby("kernel")["description"].last()
    if "operation" in calls:
        # the id of a kernel's operation, or one id for a set of several, the same on every rank
        operations = calls[calls["operation"] >= 0].sort_values("operation").groupby("kernel")["operation"]
        columns["operation"], several = operations.first(), operations.nunique() > 1
        for kernel in several.index[several]:
            ids = operations.get_group(kernel).unique().astype("<i8")
            digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
            columns["operation"][kernel] = int.from_bytes(digest, "little") >> 1
    for name, column in columns.items():
        table[name] = column.astype(table[name].dtype).reindex(table.index, fill_value=values[name])
    return table


def _passing(rank: int, calls: pd.DataFrame, owner: Int64Array, trace: Trace) -> tuple[npt.NDArray[Any], Int64Array]:
    """The ranks between which each kernel passes messages, if known, as the same text on both: `` 0 <-> 1``, else '';
    and the direction: 0 to the higher rank, 1 to the lower, 2 both.

    A communicator's sends and receives have no common order on its ranks, but those from one rank to another have.
    """
    partner_names: npt.NDArray[Any] = np.full(len(calls), "", dtype=object)
    direction = np.zeros(len(calls), dtype=np.int64)
    passes = (calls["kind"].isin(_POINT_TO_POINT) & (calls["communicator"] != "")).to_numpy()
    if trace.collectives is None or "peers" not in trace.collectives:
        return partner_names, direction
    rows = np.flatnonzero((owner >= 0) & np.append(passes, False)[owner])
    pairs: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    messages = trace.collectives.iloc[rows][["call", "peers"]].astype(str)
    for kernel, name, peer in zip(owner[rows].tolist(), messages["call"], messages["peers"], strict=True):
        kind = kind_of(name)
        is_known = peer.isdecimal() and kind in ("Send", "Recv")
        ranks = (rank, int(peer)) if is_known else (NONE, NONE)
        pairs[kernel].add(ranks if kind == "Send" else ranks[::-1])
    for kernel, passed in pairs.items():
        members = sorted({member for pair in passed for member in pair})
        if members[0] != NONE and len(members) == 2:
            partner_names[kernel] = f" {members[0]} <-> {members[1]}"
            direction[kernel] = 2 if len(passed) == 2 else next(iter(passed)) != tuple(members)
        elif members[0] != NONE:  # several peers, or itself
            partner_names[kernel] = f" {rank} <-> several"
    return partner_names, direction
