"""A capture as tables: every table and column, its type, unit and meaning.

A `Trace` has columns, not objects. Times are int64 nanoseconds since the capture's zero, sizes are int64 bytes, text is
categorical. Nothing here is derived but one join: attribution and all views are computed from these tables in
`nvprof_kit._analysis`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

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
    bounds: tuple[float, float] | None = None


def _on_request(dtype: str, meaning: str, bounds: tuple[float, float] | None = None) -> Column:
    return Column(dtype, meaning, optional=True, bounds=bounds)


LARGEST_BYTES = 1 << 50
"""Larger than any size or count on a real machine."""
_DEVICES = (0, 1023)


RANGES: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the range was pushed or started"),
    "end_ns": Column("int64", "when it was popped or ended; the end of the capture if it was left open"),
    "pid": Column("int64", "process key: nsys's globalPid, Kineto's pid"),
    "tid": Column("int64", "thread key, unique over processes: nsys's globalTid"),
    "nested": Column("bool", "a push/pop range, which nests on its thread; False for a start/end range"),
    "left_open": Column("bool", "it was still open when the capture ended"),
    "category": Column("category", "name of the NVTX category, '' if none"),
    "text": Column("category", "the message"),
    "payload": Column("Int64", "integer payload, NA if none"),
}
"""Ranges of the chosen NVTX domain (annotations, in a Kineto trace)."""

API: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the call began on the CPU"),
    "tid": Column("int64", "thread that made the call"),
    "pid": Column("int64", "process that made the call"),
    "correlation": Column("int64", "correlation id, shared with the launched operations; unique within a process"),
    "duration_ns": _on_request("int64", "duration of the call", bounds=(0, math.inf)),
}
"""CUDA runtime and driver calls that launched operations."""

CALLS: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the call began on the CPU"),
    "end_ns": Column("int64", "when it returned"),
    "tid": Column("int64", "thread that made the call"),
    "pid": Column("int64", "process that made the call"),
    "correlation": Column("int64", "correlation id, which the launched GPU operations share; -1 if none"),
    "kind": Column("int8", "0: CUDA call; 1: profiler overhead; 2: operator; 3: system call", bounds=(0, 3)),
    "name": Column("category", "name of the function, without its version suffix"),
    "kernel": _on_request("category", "kernel that the call launches; '' if none, or not recorded"),
}
"""CUDA runtime and driver calls, PyTorch operators, and profiler overheads."""

LOADS_CODE = re.compile(r"cu(da)?(Module|Library)Load|cuLink(Create|Add|Complete)")
"""Names of the calls that load or link device code."""

CALL_KINDS = ("api", "overhead", "operator", "system")
"""Values of `CALLS.kind`: `overhead` is profiler overhead, `operator` is a PyTorch operator (`aten::addmm`) or a Python
garbage collection (`Python GC`); `system` is a call of the operating system in which a thread waits (`recv`).
"""

LOADS: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the call began"),
    "end_ns": Column("int64", "when it ended"),
}
"""Calls that load CUDA modules or libraries, compile or autotune."""

OPS: Mapping[str, Column] = {
    "start_ns": Column("int64", "when it began on the device"),
    "end_ns": Column("int64", "when it ended on the device"),
    "device": Column("int64", "device ordinal as the process sees it", bounds=_DEVICES),
    "pid": Column("int64", "process that launched it"),
    "correlation": Column("int64", "correlation id of the launching call, -1 if unknown"),
    "graph_node": Column("int64", "CUDA graph node that a replay ran; -1 without a replay traced by node"),
    "kind": Column("int8", "0: kernel; 1: memcpy; 2: memset; 3: whole graph; 4: operator", bounds=(0, 4)),
    "name": _on_request("category", "name of the kernel, or direction of the copy"),
    "stream": _on_request("int64", "stream id, unique within process and context"),
    "bytes": _on_request("int64", "bytes copied or set, -1 for a kernel", bounds=(-1, LARGEST_BYTES)),
    "host_memory": _on_request("category", "host memory of a copy: pageable, pinned or managed; '' if none"),
    "mangled": _on_request("category", "mangled name of the kernel, '' if none"),
    "grid_x": _on_request("int64", "grid size in x, in blocks; -1 if not a kernel"),
    "grid_y": _on_request("int64", "grid size in y"),
    "grid_z": _on_request("int64", "grid size in z"),
    "block_x": _on_request("int64", "block size in x, in threads; -1 if not a kernel"),
    "block_y": _on_request("int64", "block size in y"),
    "block_z": _on_request("int64", "block size in z"),
    "registers": _on_request("int64", "registers per thread, -1 if not a kernel"),
    "shared_bytes": _on_request("int64", "static and dynamic shared memory per block in bytes, -1 if not a kernel"),
    "operator_call": _on_request("int64", "number of the operator call that this interval is part of, from 0"),
    "captured_by": _on_request("category", "operator that launched it when its graph was captured, '' if unknown"),
}
"""GPU operations; in a capture without a GPU, the self time intervals of CPU operators. Such a capture always has the
column ``operator_call``, because one operator call can have several rows.
"""

GRAPH_NODES: Mapping[str, Column] = {
    "node": Column("int64", "graph node id"),
    "original": Column("int64", "the node it was instantiated from; -1 if it was captured or made explicitly"),
    "start_ns": Column("int64", "when the node was created"),
    "tid": Column("int64", "thread that created it"),
    "pid": Column("int64", "process"),
}
"""Creations of CUDA-graph nodes (node-level tracing only)."""

REPLAYED = -(2**62)
"""A `tid` below this is no thread but the order of a graph's nodes: its times are positions of nodes, so its ranges are
no calls and take no CPU time; each replay is a call.
"""

OPERATORS: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the operator began on the CPU"),
    "end_ns": Column("int64", "when it ended"),
    "pid": Column("int64", "process"),
    "tid": Column("int64", "thread that ran it"),
    "backward": Column("bool", "True for an autograd node, False for a forward operator that created one"),
    "engine": Column("bool", "True for the engine's evaluation of a node, which encloses its own operator"),
    "sequence": Column("int64", "autograd sequence number, of a node that of its operator; -1 if none"),
    "forward_tid": Column("int64", "thread of the forward operator that created the node; -1 if unknown"),
    "name": Column("category", "the operator's name"),
}
"""Operators with autograd sequence numbers, if the capture has them (a Kineto trace)."""

SHAPES: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the operator began on the CPU"),
    "end_ns": Column("int64", "when it ended"),
    "pid": Column("int64", "process"),
    "tid": Column("int64", "thread that ran it"),
    "name": Column("category", "the operator's name"),
    "arguments": Column("category", "JSON list of lists: shapes, types, values and strides of its arguments"),
}
"""Arguments of operators, if the capture has them (a Kineto trace recorded with shapes)."""

SAMPLES: Mapping[str, Column] = {
    "time_ns": Column("int64", "start of the sampling interval, which lasts until the next sample of the same GPU"),
    "device": Column("int64", "device ordinal in the process; if unknown, the GPU's id in nsys"),
    "metric": Column("category", "name of the metric without its unit, such as `SM Active`"),
    "value": Column("float64", "mean over the interval; of throughputs in percent", bounds=(0, LARGEST_BYTES)),
}
"""GPU metrics samples, if nsys recorded them (`--gpu-metrics-device`)."""

SCHEDULED: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the thread was scheduled on a CPU"),
    "end_ns": Column("int64", "when it was descheduled"),
    "pid": Column("int64", "its process"),
    "tid": Column("int64", "the thread"),
}
"""Intervals in which a thread ran on a CPU, if nsys traced context switches (`--cpuctxsw`)."""

FRAMES: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the Python function was called"),
    "end_ns": Column("int64", "when it returned"),
    "pid": Column("int64", "its process"),
    "tid": Column("int64", "the thread"),
    "name": Column("category", "file, line and name of the function: `train.py(12): preprocess`"),
}
"""Calls of Python functions of `LONG_FRAME_NS` or more, if the capture has them (a Kineto trace with stacks)."""

LONG_FRAME_NS = 100_000
"""Shorter calls of Python functions are not read: there are millions, and none explains a gap worth naming."""

COLLECTIVES: Mapping[str, Column] = {
    "start_ns": Column("int64", "when the call of the communication library began on the CPU"),
    "end_ns": Column("int64", "when it returned"),
    "pid": Column("int64", "process"),
    "tid": Column("int64", "thread that made the call"),
    "correlation": Column("int64", "correlation id of its kernel; -1 if the kernel is matched by thread and time"),
    "call": Column("category", "name of the function: `ncclAllReduce`; `ncclGroupEnd` launches its group"),
    "bytes": Column("int64", "bytes of the larger buffer, of an all-gather its whole output; -1 if unknown"),
    "ranks": Column("int64", "number of ranks in its group, -1 if unknown"),
    "communicator": _on_request("category", "id of the communicator, the same on every rank; '' if unknown"),
    "description": _on_request("category", "name that the program gave the communicator, '' if unknown"),
    "sequence": _on_request("int64", "sequence number within the communicator, -1 if unknown"),
    "peers": _on_request("category", "ranks of the group, or the peer of a send or receive; '' if unknown"),
    "operation": _on_request("int64", "id of the operation, the same on every rank; -1 if unknown"),
}
"""Calls of a communication library (NCCL), if the capture has their messages."""

MARKS: Mapping[str, Column] = {
    "time_ns": Column("int64", "when it was emitted"),
    "pid": Column("int64", "process"),
    "tid": Column("int64", "thread that emitted it"),
    "category": Column("category", "name of the NVTX category, '' if none"),
    "text": Column("category", "the message"),
    "payload": Column("Int64", "integer payload, NA if none"),
}
"""Marks of the chosen NVTX domain; those of category ``memory`` belong to layer ranges (`nvprof_kit.names`)."""

ALLOCATIONS: Mapping[str, Column] = {
    "time_ns": Column("int64", "when it happened; 0 or less for memory allocated before the capture"),
    "pid": Column("int64", "process"),
    "tid": Column("int64", "thread of the call, -1 if the call is not in the capture"),
    "call_ns": Column("int64", "when the call began, -1 if it is not in the capture"),
    "device": Column("int64", "device ordinal as the process sees it", bounds=_DEVICES),
    "bytes": Column("int64", "bytes allocated; negative for a free", bounds=(-LARGEST_BYTES, LARGEST_BYTES)),
    "kind": Column("category", "kind of memory: device, managed, array, pinned, static, …"),
}
"""CUDA memory allocations and frees, if nsys traced them (`--cuda-memory-usage=true`)."""

OP_KINDS = ("kernel", "memcpy", "memset", "graph", "operator")
"""Values of `OPS.kind`: `graph` is one whole-graph replay, `operator` a CPU operator."""

TABLES: Mapping[str, Mapping[str, Column]] = (
    {"ranges": RANGES, "api": API, "ops": OPS, "calls": CALLS, "graph_nodes": GRAPH_NODES, "operators": OPERATORS}
    | {"marks": MARKS, "allocations": ALLOCATIONS}
    | {"samples": SAMPLES, "collectives": COLLECTIVES, "scheduled": SCHEDULED, "loads": LOADS, "shapes": SHAPES}
    | {"frames": FRAMES}
)


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

    required: tuple[str, ...]
    partial: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = {}


_OPERATION = ("start", "end", "deviceId", "streamId")
_PAYLOADS = ("int64Value", "uint64Value", "int32Value", "uint32Value")
_LAUNCHED = ("correlationId", "globalPid")
_LAUNCH = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")
_SIZED: Mapping[str, tuple[float, float]] = {"bytes": (0, LARGEST_BYTES)}

NSYS_SOURCES: Mapping[str, NsysTable] = {
    "StringIds": NsysTable(("id", "value"), texts=("value",)),
    "NVTX_EVENTS": NsysTable(
        ("start", "eventType"),
        partial=("globalTid", "domainId"),
        nullable=("end", "endGlobalTid", "category", "text", "textId", *_PAYLOADS),
        texts=("text",),
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": NsysTable((*_OPERATION, "demangledName", *_LAUNCH, *_SHARED), partial=_LAUNCHED),
    "CUPTI_ACTIVITY_KIND_MEMCPY": NsysTable(
        (*_OPERATION, "bytes", "copyKind"), _LAUNCHED, ("srcKind", "dstKind"), bounds=_SIZED
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": NsysTable((*_OPERATION, "bytes"), partial=_LAUNCHED, bounds=_SIZED),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": NsysTable(_OPERATION, partial=_LAUNCHED),
    "CUPTI_ACTIVITY_KIND_RUNTIME": NsysTable(("start", "end", "nameId"), partial=("globalTid", "correlationId")),
    "PROFILER_OVERHEAD": NsysTable(("start", "end", "globalTid", "nameId")),
    "OSRT_API": NsysTable(("start", "end", "globalTid", "nameId")),
    "CUDA_GRAPH_NODE_EVENTS": NsysTable(
        ("start", "graphNodeId"), partial=("globalTid",), nullable=("originalGraphNodeId",)
    ),
    "CUDA_GPU_MEMORY_USAGE_EVENTS": NsysTable(
        ("start", "bytes", "deviceId", "memKind", "memoryOperationType"),
        partial=("globalPid",),
        nullable=("correlationId",),
        bounds={**_SIZED, "memoryOperationType": (0, 1)},
    ),
    "GPU_METRICS": NsysTable(("typeId", "metricId", "value"), partial=("timestamp",)),
    "TARGET_INFO_GPU_METRICS": NsysTable(("typeId", "metricId", "metricName"), texts=("metricName",)),
    "SCHED_EVENTS": NsysTable(("start", "isSchedIn"), partial=("globalTid",), bounds={"isSchedIn": (0, 1)}),
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": NsysTable(
        ("domainId", "schemaId"), partial=("name",), nullable=("offset",), texts=("name",)
    ),
    "NCCL_GPU_OPERATIONS": NsysTable(("start", "end", "operationId", "text"), texts=("text",)),
}
"""The tables of an nsys export used for a `Trace`; the others only describe the system."""

NSYS_DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    "META_DATA_EXPORT": {"name": "text", "value": "text"},
    "EXPORT_META_DATA": {"name": "text", "value": "text"},
    "TARGET_INFO_GPU": {"id": "integer", "name": "text"},
    "DIAGNOSTIC_EVENT": {"severity": "integer", "text": "text"},
    "ANALYSIS_DETAILS": {"duration": "", "stopTime": ""},
    "TARGET_INFO_SYSTEM_ENV": {"name": "text", "value": ""},
}
"""The columns that are read of the tables that describe the system, with the SQLite type of their values; '' for any.
Without them the numbers are the same, but names and messages of nsys are lost.
"""

KINETO_SOURCES: Mapping[str, tuple[str, ...]] = {
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
