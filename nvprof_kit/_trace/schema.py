"""A capture as tables: every table and column, its type, unit and meaning.

A `Trace` is columns, not objects. Times are int64 nanoseconds since the capture's own zero, sizes int64 bytes,
text is categorical. Nothing here is derived: attribution and every view are made from these tables in
`nvprof_kit._analysis`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # readers start reading before pandas is loaded: see `nvprof_kit._trace.nsys.read`
    import pandas as pd


class Column(NamedTuple):
    """One column: its NumPy or pandas type, what it means, and whether it is read only when a question needs it."""

    dtype: str
    meaning: str
    optional: bool = False


RANGES: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the range was pushed or started"),
        "end_ns": Column("int64", "when it was popped or ended; the capture's end where it was left open"),
        "pid": Column("int64", "process key: nsys's globalPid, Kineto's pid"),
        "tid": Column("int64", "thread key, unique over processes: nsys's globalTid"),
        "nested": Column("bool", "a push/pop range, which nests on its thread; False for a start/end range"),
        "left_open": Column("bool", "it was still open when the capture ended"),
        "category": Column("category", "name of the NVTX category, '' if none"),
        "text": Column("category", "the message"),
        "payload": Column("Int64", "integer payload, NA if none"),
    }
)
"""Ranges of the chosen NVTX domain (annotations, in a Kineto trace)."""

API: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the call began on the CPU"),
        "tid": Column("int64", "thread that made the call"),
        "pid": Column("int64", "process that made the call"),
        "correlation": Column("int64", "id that the GPU operations it launched carry, unique within a process"),
        "duration_ns": Column("int64", "how long the call took", optional=True),
    }
)
"""CUDA runtime and driver calls that launched something."""

CALLS: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the call began on the CPU"),
        "end_ns": Column("int64", "when it returned"),
        "tid": Column("int64", "thread that made the call"),
        "pid": Column("int64", "process that made the call"),
        "correlation": Column("int64", "id that the GPU operations it launched carry, -1: none"),
        "kind": Column("int8", "index into CALL_KINDS"),
        "name": Column("category", "name of the function, without its ABI version"),
    }
)
"""CUDA runtime and driver calls, PyTorch's operators, and stretches in which the profiler held the program up."""

LOADS_CODE = re.compile(r"cu(da)?(Module|Library)Load|cuLink(Create|Add|Complete)")
"""Names of the calls that load code onto the device, or link it."""

CALL_KINDS = ("api", "overhead", "operator")
"""Values of `CALLS.kind`: `overhead` is the profiler's own, `operator` a PyTorch operator (`aten::addmm`) or a
garbage collection of Python's (`Python GC`).
"""

LOADS: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the call began"),
        "end_ns": Column("int64", "when it ended"),
    }
)
"""Calls in which the program loaded CUDA modules or libraries, compiled or tuned."""

OPS: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when it began on the device"),
        "end_ns": Column("int64", "when it ended on the device"),
        "device": Column("int64", "device ordinal as the process sees it"),
        "pid": Column("int64", "process that launched it"),
        "correlation": Column("int64", "the launching call's id, -1 if unknown"),
        "graph_node": Column("int64", "CUDA-graph node that a replay ran, -1 outside a node-traced replay"),
        "kind": Column("int8", "index into OP_KINDS"),
        "name": Column("category", "kernel's name, or the kind of copy", optional=True),
        "stream": Column("int64", "stream id, unique within process and context", optional=True),
        "bytes": Column("int64", "bytes moved or set, -1 for a kernel", optional=True),
        "host_memory": Column("category", "host end of a copy: pageable, pinned or managed; '' if none", optional=True),
        "mangled": Column("category", "kernel's linker name, '' if none", optional=True),
        "grid_x": Column("int64", "blocks of a kernel's launch, -1 if none", optional=True),
        "grid_y": Column("int64", "the same in y", optional=True),
        "grid_z": Column("int64", "the same in z", optional=True),
        "block_x": Column("int64", "threads of a block, -1 if none", optional=True),
        "block_y": Column("int64", "the same in y", optional=True),
        "block_z": Column("int64", "the same in z", optional=True),
        "registers": Column("int64", "registers of a thread, -1 if none", optional=True),
        "shared_bytes": Column("int64", "shared memory of a block, static and dynamic, -1: none", optional=True),
        "operator_call": Column(
            "int64", "the call of a CPU operator that it is a stretch of, counted from 0", optional=True
        ),
    }
)
"""Operations on the GPU; in a capture without a GPU, the stretches in which a CPU operator itself runs: such a capture
has the column ``operator_call``, asked for or not, since a row is no call there.
"""

GRAPH_NODES: Mapping[str, Column] = MappingProxyType(
    {
        "node": Column("int64", "graph node id"),
        "original": Column(
            "int64", "id of the node it was cloned or instantiated from, -1 for a node built by capture or by hand"
        ),
        "start_ns": Column("int64", "when the node was created"),
        "tid": Column("int64", "thread that created it"),
        "pid": Column("int64", "process"),
    }
)
"""Creations of CUDA-graph nodes (node-level tracing only)."""

OPERATORS: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the operator began on the CPU"),
        "end_ns": Column("int64", "when it ended"),
        "pid": Column("int64", "process"),
        "tid": Column("int64", "thread that ran it"),
        "backward": Column("bool", "a node of the backward pass; else an operator of the forward that made a node"),
        "engine": Column("bool", "of a node, what the engine does for it: the node's own work lies inside"),
        "sequence": Column("int64", "sequence number that a node shares with the operator that made it, -1: none"),
        "forward_tid": Column("int64", "thread whose forward made a node, -1 where it is not known"),
        "name": Column("category", "the operator's name"),
    }
)
"""Operators that autograd counts, where the capture has them (a Kineto trace)."""

SHAPES: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the operator began on the CPU"),
        "end_ns": Column("int64", "when it ended"),
        "pid": Column("int64", "process"),
        "tid": Column("int64", "thread that ran it"),
        "name": Column("category", "the operator's name"),
        "arguments": Column("category", "JSON: shapes, types, and values of its arguments, a list of each"),
    }
)
"""What operators were called with, where the capture has it (a Kineto trace recorded with shapes)."""

SAMPLES: Mapping[str, Column] = MappingProxyType(
    {
        "time_ns": Column("int64", "when the sample's interval began; it lasts until the next one of its GPU"),
        "device": Column("int64", "device ordinal as the process sees it, else the GPU's own number"),
        "metric": Column("category", "the metric's name without its unit: `SM Active`"),
        "value": Column("float64", "its mean over the interval, in percent of the peak where the metric has one"),
    }
)
"""Samples of GPU metrics, where nsys took them (`--gpu-metrics-device`)."""

SCHEDULED: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the thread was put on a CPU"),
        "end_ns": Column("int64", "when it was taken off"),
        "pid": Column("int64", "its process"),
        "tid": Column("int64", "the thread"),
    }
)
"""Stretches in which a thread ran on a CPU, where nsys watched it (`--cpuctxsw`)."""

COLLECTIVES: Mapping[str, Column] = MappingProxyType(
    {
        "start_ns": Column("int64", "when the call of the communication library began on the CPU"),
        "end_ns": Column("int64", "when it returned"),
        "pid": Column("int64", "process"),
        "tid": Column("int64", "thread that made the call"),
        "correlation": Column("int64", "id that its kernel carries, -1 where only thread and time tell the kernel"),
        "call": Column("category", "what was called: `ncclAllReduce`; `ncclGroupEnd` launches what its group called"),
        "bytes": Column(
            "int64",
            "bytes of its larger buffer: all of an all-gather's output or a reduce-scatter's input; -1: unknown",
        ),
        "ranks": Column("int64", "ranks of its group, -1: unknown"),
        "communicator": Column(
            "category", "what its communicator is called on every rank; '' if unknown", optional=True
        ),
        "description": Column("category", "what the program calls the communicator, '' if unknown", optional=True),
        "sequence": Column("int64", "sequence number within the communicator, -1: unknown", optional=True),
        "peers": Column("category", "ranks of the group, or the other rank of a send or receive; ''", optional=True),
        "operation": Column("int64", "id that the operation has on every rank, -1: unknown", optional=True),
    }
)
"""Calls of a communication library (NCCL), where the capture tells what they moved."""

MARKS: Mapping[str, Column] = MappingProxyType(
    {
        "time_ns": Column("int64", "when it was set"),
        "pid": Column("int64", "process"),
        "tid": Column("int64", "thread that set it"),
        "category": Column("category", "name of the NVTX category, '' if none"),
        "text": Column("category", "the message"),
        "payload": Column("Int64", "integer payload, NA if none"),
    }
)
"""Marks of the chosen NVTX domain; those of category ``memory`` are what layers' ranges carry (`nvprof_kit.names`)."""

ALLOCATIONS: Mapping[str, Column] = MappingProxyType(
    {
        "time_ns": Column("int64", "when it happened; 0 or before it for what was there when the capture began"),
        "pid": Column("int64", "process"),
        "tid": Column("int64", "thread whose call asked for it, -1 where the call is not in the capture"),
        "call_ns": Column("int64", "when that call began, -1 where it is not in the capture"),
        "device": Column("int64", "device ordinal as the process sees it"),
        "bytes": Column("int64", "bytes allocated, negative where they were freed"),
        "kind": Column("category", "kind of memory: device, managed, array, pinned, static, …"),
    }
)
"""Memory that CUDA itself handed out and took back, where nsys traced it (`--cuda-memory-usage=true`)."""

OP_KINDS = ("kernel", "memcpy", "memset", "graph", "operator")
"""Values of `OPS.kind`: `graph` is one whole-graph replay, `operator` a CPU operator."""

TABLES: Mapping[str, Mapping[str, Column]] = MappingProxyType(
    {"ranges": RANGES, "api": API, "ops": OPS, "calls": CALLS, "graph_nodes": GRAPH_NODES, "operators": OPERATORS}
    | {"marks": MARKS, "allocations": ALLOCATIONS}
    | {"samples": SAMPLES, "collectives": COLLECTIVES, "scheduled": SCHEDULED, "loads": LOADS, "shapes": SHAPES}
)


BUSY_CALLS = "busy calls"
"""Asked for beside ``calls``: of these only calls that launch, wait, allocate or free, and the profiler's overheads."""


class Source(NamedTuple):
    """What a table of an nsys export must have, where the table is there (schemas 2.7 to 3.28).

    Attributes:
        needed: Columns with a value in every row.
        given: Columns that must be there, and be NULL only in rows to which they do not apply: not in all.
        nullable: Columns that must be there and may be NULL in every row.
        texts: Those of the columns that hold text; all others hold whole numbers.
    """

    needed: tuple[str, ...]
    given: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


_OPERATION = ("start", "end", "deviceId", "streamId")
_PAYLOADS = ("int64Value", "uint64Value", "int32Value", "uint32Value")
_LAUNCHED = ("correlationId", "globalPid")
_LAUNCH = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")

NSYS_SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "StringIds": Source(("id", "value"), texts=("value",)),
        "NVTX_EVENTS": Source(
            ("start", "eventType"),
            given=("globalTid", "domainId"),
            nullable=("end", "endGlobalTid", "category", "text", "textId", *_PAYLOADS),
            texts=("text",),
        ),
        "CUPTI_ACTIVITY_KIND_KERNEL": Source((*_OPERATION, "demangledName", *_LAUNCH, *_SHARED), given=_LAUNCHED),
        "CUPTI_ACTIVITY_KIND_MEMCPY": Source((*_OPERATION, "bytes", "copyKind"), _LAUNCHED, ("srcKind", "dstKind")),
        "CUPTI_ACTIVITY_KIND_MEMSET": Source((*_OPERATION, "bytes"), given=_LAUNCHED),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": Source(_OPERATION, given=_LAUNCHED),
        "CUPTI_ACTIVITY_KIND_RUNTIME": Source(("start", "end", "nameId"), given=("globalTid", "correlationId")),
        "PROFILER_OVERHEAD": Source(("start", "end", "globalTid", "nameId")),
        "CUDA_GRAPH_NODE_EVENTS": Source(
            ("start", "graphNodeId"), given=("globalTid",), nullable=("originalGraphNodeId",)
        ),
        "CUDA_GPU_MEMORY_USAGE_EVENTS": Source(
            ("start", "bytes", "deviceId", "memKind", "memoryOperationType"),
            given=("globalPid",),
            nullable=("correlationId",),
        ),
        "GPU_METRICS": Source(("typeId", "metricId", "value"), given=("timestamp",)),
        "TARGET_INFO_GPU_METRICS": Source(("typeId", "metricId", "metricName"), texts=("metricName",)),
        "SCHED_EVENTS": Source(("start", "isSchedIn"), given=("globalTid",)),
        "NVTX_PAYLOAD_SCHEMA_ENTRIES": Source(
            ("domainId", "schemaId"), given=("name",), nullable=("offset",), texts=("name",)
        ),
    }
)
"""The tables of an nsys export that a `Trace` is read from; the others only say where the capture was made."""

KINETO_SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kernel": ("name", "ts", "dur", "args.device", "args.stream", "args.correlation"),
        "gpu_memcpy": ("name", "ts", "dur", "args.device", "args.stream", "args.correlation", "args.bytes"),
        "gpu_memset": ("name", "ts", "dur", "args.device", "args.stream", "args.correlation", "args.bytes"),
        "cuda_runtime": ("name", "ts", "dur", "tid", "args.correlation"),
        "cuda_driver": ("name", "ts", "dur", "tid", "args.correlation"),
        "overhead": ("name", "ts", "dur", "tid"),
        "cpu_op": ("name", "ts", "dur", "tid"),
        "user_annotation": ("name", "ts", "dur", "tid"),
        "python_function": ("name", "ts", "dur", "tid"),
    }
)
"""Keys that each complete event of a Kineto trace must have, by category."""


MEMORY_TABLES = ("marks", "allocations")
"""The optional tables in which a capture tells of memory."""


@dataclass(frozen=True)
class CaptureInfo:
    """What a capture says of itself.

    Attributes:
        path: The file the user named.
        tool: What wrote it, with its version: ``nsys 2023.4.4.54``, ``PyTorch profiler (Kineto)``.
        schema: Version of the export schema, '' if none.
        domain: NVTX domain that `Trace.ranges` was read from.
        gpus: Names of the GPUs that ran something, by device ordinal, ascending.
        ordinals: These ordinals.
        on_gpu: False where the operations are CPU operators.
        processes: Number of processes with ranges or operations.
        session_ns: How long the profiled program ran, before and after the collected window too; 0 where the capture
            does not say.
        other_domains: Names of the NVTX domains that `Trace.ranges` was not read from.
        own_window: Whether the program itself opened the collected window, by cudaProfilerStart.
        lacks: Why there are no operations at all, and what to do; '' where there are some. Only the CPU's times can be
            told then.
        warnings: Sentences on what may be missing or distorted, each with what to do.
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
    lacks: str = ""
    warnings: tuple[str, ...] = ()

    def gpu_name(self, device: int) -> str:
        """Name of the GPU with this ordinal, '' if unknown it."""
        return dict(zip(self.ordinals, self.gpus, strict=False)).get(device, "")


@dataclass(frozen=True)
class Trace:
    """One capture: tables with the columns of `TABLES`, and what the capture says of itself.

    Rows come in no promised order. An optional column and the tables `calls`, `samples`, `marks`, `allocations`,
    `collectives`, `scheduled`, `loads` and `shapes` are there only when asked for. `operators` is None where the
    capture has none, or where its ranges tell the backward pass themselves.
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
