"""A capture as tables: every table and column, its type, unit and meaning.

A `Trace` has columns, not objects. Times are int64 nanoseconds since the capture's zero, sizes are int64 bytes, text is
categorical. Nothing here is derived but one join: attribution and all views are computed from these tables in
`nvprof_kit._analysis`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nvprof_kit._toml import read_toml
from nvprof_kit._trace.joins import Int64Array, created_nodes, launching_calls
from nvprof_kit.issues import Issue

if TYPE_CHECKING:  # readers start before pandas is loaded: see `nvprof_kit._trace.nsys.read`
    import pandas as pd


class Column(NamedTuple):
    """One column: its NumPy or pandas type, its meaning, whether it is read only on request, and the least and the
    greatest value that can be.
    """

    dtype: str
    meaning: str
    optional: bool = False
    bounds: Sequence[float] | None = None


def read_tables(package: str, file: str = "columns.toml") -> Mapping[str, Mapping[str, Column]]:
    """The tables that a file of a package describes, and their columns."""
    tables = read_toml(package, file)
    return {table: {name: Column(**entry) for name, entry in columns.items()} for table, columns in tables.items()}


TABLES = read_tables("nvprof_kit._trace")
"""The tables of a `Trace`, and their columns."""

OPS, SHAPES, FRAMES = (TABLES[table] for table in ("ops", "shapes", "frames"))

LOADS_CODE = re.compile(r"cu(da)?(Module|Library)Load|cuLink(Create|Add|Complete)")
"""Names of the calls that load or link device code."""

CALL_KINDS = ("api", "overhead", "operator", "system")
"""Values of ``calls.kind``: `overhead` is profiler overhead, `operator` a PyTorch operator (`aten::addmm`) or a Python
garbage collection (`Python GC`); `system` is a call of the operating system in which a thread waits (`recv`).
"""

REPLAYED = -(2**62)
"""A `tid` below this is no thread but the order of a graph's nodes: its times are positions of nodes, so its ranges are
no calls and take no CPU time; each replay is a call.
"""

LONG_FRAME_NS = 100_000
"""Shorter calls of Python functions are not read: there are millions, and none explains a gap worth naming."""

OP_KINDS = ("kernel", "memcpy", "memset", "graph", "operator")
"""Values of ``ops.kind``: `graph` is one whole-graph replay, `operator` a CPU operator."""


BUSY_CALLS = "busy calls"
"""Restricts ``calls`` to calls that launch, wait, allocate or free, and profiler overheads."""


class NsysTable(NamedTuple):
    """Requirements for a table of an nsys export, if the table exists (schemas 2.7 to 3.28).

    Attributes:
        required: Columns with a value in every row.
        partial: Required columns that are NULL in rows to which they do not apply, but not in all rows.
        nullable: Required columns that can be NULL in all rows.
        texts: The text columns; all others are integers.
        bounds: The least and the greatest value of columns with bounds that their columns of a `Trace` do not have.
    """

    required: Sequence[str]
    partial: Sequence[str] = ()
    nullable: Sequence[str] = ()
    texts: Sequence[str] = ()
    bounds: Mapping[str, Sequence[float]] = {}


_SOURCES = read_toml("nvprof_kit._trace", "sources.toml")

NSYS_SOURCES: Mapping[str, NsysTable] = {table: NsysTable(**entry) for table, entry in _SOURCES["nsys"].items()}
"""The tables of an nsys export used for a `Trace`; the others only describe the system."""

NSYS_TABLES: Mapping[str, str] = _SOURCES["nsys_tables"]
"""The tables of an nsys export that each table of a `Trace` is read from."""

NSYS_DESCRIPTIONS: Mapping[str, Mapping[str, str]] = _SOURCES["nsys_descriptions"]
"""The columns that are read of the tables that describe the system, with the type of their values; '' for any."""

KINETO_SOURCES: Mapping[str, Sequence[str]] = _SOURCES["kineto"]
"""Required keys of complete events in a Kineto trace, by category."""


SOUGHT = "sought"
"""`CaptureInfo.evidence` of a capture without ranges of ours, before it is decided what its layers are from."""


class Losses(NamedTuple):
    """What nsys lost or took, as far as the capture tells.

    Attributes:
        launches: Calls that launched a kernel, 0 if they cannot be compared with kernels.
        lost_kernels: Those of them without a kernel in the capture.
        replays: Launches of CUDA graphs.
        whole_graphs: Those of them that were traced as a whole.
        overhead_ns: Time that nsys itself took between the first and the last operation.
    """

    launches: int = 0
    lost_kernels: int = 0
    replays: int = 0
    whole_graphs: int = 0
    overhead_ns: int = 0


@dataclass(frozen=True)
class CaptureInfo:
    """Metadata of a capture.

    Attributes:
        path: The file as given by the user.
        tool: The tool that wrote it, with version: ``nsys 2023.4.4.54``, ``PyTorch profiler (Kineto)``.
        schema: Version of the export schema; '' if none.
        domain: NVTX domain that `Trace.ranges` was read from.
        gpus: Names of the GPUs that ran operations, in the order of `ordinals`.
        ordinals: Device ordinals of these GPUs, ascending.
        on_gpu: False if the operations are CPU operators.
        processes: Number of processes with ranges or operations.
        session_ns: Run time of the profiled program, including the time outside the collected window; 0 if unknown.
        other_domains: Names of the NVTX domains that are not in `Trace.ranges`.
        evidence: What the layers are from where no option says it: `structure`, a known program; '' if they are ours.
        own_window: Whether the program started the collected window with cudaProfilerStart.
        no_ops_reason: Why there are no operations, and what to do; '' if there are some. Without operations, only CPU
            times are available.
        losses: What was lost in it; only nsys tells.
        warnings: What is missing or distorted, each with what to do.
    """

    path: str
    tool: str
    schema: str = ""
    domain: str = ""
    gpus: tuple[str, ...] = ()
    ordinals: tuple[int, ...] = ()
    on_gpu: bool = True
    processes: int = 1
    session_ns: int = 0
    own_window: bool = False
    other_domains: tuple[str, ...] = ()
    no_ops_reason: str = ""
    evidence: str = ""
    losses: Losses = field(default_factory=Losses)
    warnings: tuple[Issue, ...] = ()

    def gpu_name(self, device: int) -> str:
        """Name of the GPU with this ordinal; '' if unknown."""
        return dict(zip(self.ordinals, self.gpus, strict=False)).get(device, "")


@dataclass(frozen=True)
class Trace:
    """One capture: tables with the columns of `TABLES`, and metadata.

    The order of rows is unspecified. Optional columns and the tables `calls`, `samples`, `marks`, `allocations`,
    `collectives`, `scheduled`, `loads`, `shapes` and `frames` are read only on request. `operators` is None if the
    capture has none, or if its ranges cover the backward pass.
    """

    info: CaptureInfo
    ranges: pd.DataFrame
    api: pd.DataFrame
    ops: pd.DataFrame
    graph_nodes: pd.DataFrame
    calls: pd.DataFrame | None = None
    samples: pd.DataFrame | None = None
    operators: pd.DataFrame | None = None
    marks: pd.DataFrame | None = None
    allocations: pd.DataFrame | None = None
    collectives: pd.DataFrame | None = None
    scheduled: pd.DataFrame | None = None
    loads: pd.DataFrame | None = None
    shapes: pd.DataFrame | None = None
    frames: pd.DataFrame | None = None

    @cached_property
    def durations(self) -> Int64Array:
        """How long each operation took in ns, shape ``(n,)``."""
        durations: Int64Array = self.ops["end_ns"].to_numpy() - self.ops["start_ns"].to_numpy()
        return durations

    @cached_property
    def launching_calls(self) -> Int64Array:
        """The row of `api` that launched each operation, -1 if the capture lacks it, shape ``(n,)``."""
        return launching_calls(self.api, self.ops)

    @cached_property
    def created_nodes(self) -> Int64Array:
        """The row of `graph_nodes` that created the node that each operation replayed, -1 if it replayed none or the
        capture lacks it, shape ``(n,)``.
        """
        return created_nodes(self.graph_nodes, self.ops)
