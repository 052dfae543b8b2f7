"""A builder of tiny nsys-shaped SQLite files, in the schemas of several nsys releases.

file = NsysFile(tmp_path / "a.sqlite")
file.range_("layers.0", 100, 200, category="forward")
file.kernel(300, 350, launched=(120, 130))
trace = open_capture(file.write())
"""

import os
import shutil
import sqlite3
import struct
from collections import defaultdict
from pathlib import Path

from support.captures.as_folder import as_folder

HARDWARE = 1 << 56
PID, TID = 7, 7
PUSH_POP, START_END, MARK, CATEGORY, DOMAIN_CREATE = 59, 60, 34, 33, 75
_RUNTIME = "start, end, eventClass, globalTid, correlationId, nameId, returnValue, callchainId"
_GPU = "start, end, deviceId, contextId, greenContextId, streamId, correlationId, globalPid"
_NVTX = (
    "start, end, eventType, rangeId, category, color, text, globalTid, endGlobalTid, textId, domainId, "
    "uint64Value, int64Value, doubleValue, uint32Value, int32Value, floatValue, jsonTextId, jsonText"
)
_KERNEL = (
    ", demangledName, shortName, mangledName, registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ, "
    "staticSharedMemory, dynamicSharedMemory, gridId, graphNodeId"
)
_COPY = ", bytes, copyKind, srcKind, dstKind, graphNodeId"
_NODES = "start, end, eventClass, globalTid, graphNodeId, originalGraphNodeId"
NCCL_SCHEMAS = {
    # fields of NCCL's payloads: codes of `struct`, and the names in nvtx_payload_schemas.h of NCCL 2.26
    "init": ("<Qiii", ("NCCL communicator ID", "No. of ranks", "Rank", "CUDA device")),
    "reduce": ("<QQi", ("NCCL communicator ID", "Message size [bytes]", "Reduction operation")),
    "move": ("<QQ", ("NCCL communicator ID", "Message size [bytes]")),
}
_PLAIN = {"NVTX_EVENTS": _NVTX, "GPU": _GPU, "NODES": "CUDA_GRAPH_EVENTS"}
_LATER = _PLAIN | {"NODES": "CUDA_GRAPH_NODE_EVENTS"}
_NEWEST = _LATER | {"NVTX_EVENTS": f"eventId, binaryData, {_NVTX}", "GPU": f"graphId, clusterX, {_GPU}"}
SCHEMAS = {
    # version of nsys: (export version, name of the metadata table, columns by table)
    "2022.4": ("2.13.1", "EXPORT_META_DATA", _PLAIN | {"GPU": _GPU.replace("greenContextId, ", "")}),
    "2023.4": ("3.7.2", "META_DATA_EXPORT", _PLAIN),
    "2024.2": ("3.11.1", "META_DATA_EXPORT", _LATER),
    "2026.4": ("3.28.1", "META_DATA_EXPORT", _NEWEST),
}


def thread(tid: int = TID, pid: int = PID) -> int:
    """nsys's globalTid."""
    return HARDWARE | pid << 24 | tid


class NsysFile:
    """Collects events, then writes them as an export of one nsys release."""

    def __init__(self, path: Path, nsys: str = "2023.4") -> None:
        self.path = path
        self.export_version, self.metadata, self.columns = SCHEMAS[nsys]
        self.nsys = nsys
        self.rows: dict[str, list[dict[str, object]]] = defaultdict(list)
        self.strings: dict[str, int] = {}
        self.domains: dict[tuple[int, str], int] = {}
        self.categories: dict[tuple[int, int, str], int] = {}
        self.correlation = 1000
        self.gpu = "Test GPU"

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def _nvtx(self, **row: object) -> None:
        self.rows["NVTX_EVENTS"].append(row)

    def _domain(self, name: str, pid: int) -> int:
        if name and (pid, name) not in self.domains:
            id_ = self.domains[pid, name] = 1 + sum(process == pid for process, _ in self.domains)
            text, process = self.string(name), thread(pid=pid)
            self._nvtx(start=-5, eventType=DOMAIN_CREATE, textId=text, globalTid=process, domainId=id_)
        return self.domains[pid, name] if name else 0

    def _category(self, name: str, domain: int, pid: int) -> int:
        key = (pid, domain, name)
        if key not in self.categories:
            id_ = self.categories[key] = 1 + len(self.categories)
            process = thread(pid=pid)
            self._nvtx(start=-4, eventType=CATEGORY, text=name, globalTid=process, domainId=domain, category=id_)
        return self.categories[key]

    def range_(
        self, text: str, start: int, end: int | None, *, category: str | None = "forward", domain: str = "nvprof_kit",
        tid: int = TID, pid: int = PID, payload: int | None = None, registered: bool = True, style: int = PUSH_POP,
    ) -> None:  # fmt: skip
        domain_id = self._domain(domain, pid)
        category_id = None if category is None else self._category(category, domain_id, pid)
        names = {"textId": self.string(text)} if registered else {"text": text}
        where = {"globalTid": thread(tid, pid), "domainId": domain_id, "category": category_id}
        self._nvtx(start=start, end=end, eventType=style, int64Value=payload, **names, **where)

    def nccl(self, name: str, start: int, end: int, schema: str, *numbers: int) -> None:
        """A call of NCCL's with its payload, as NCCL lays it out: ``<`` and the codes of `struct` for its fields."""
        self.range_(name, start, end, category=None, domain="NCCL")
        domain, id_ = self.domains[PID, "NCCL"], (1 << 24) + list(NCCL_SCHEMAS).index(schema)
        layout, names = NCCL_SCHEMAS[schema]
        payload = struct.pack(layout, *numbers)
        header = struct.pack("<QQQQ", domain, id_, len(payload), 32 + len(payload))
        self.rows["NVTX_EVENTS"][-1]["binaryData"] = header + payload
        offsets = [struct.calcsize(layout[: 1 + place]) if place else None for place in range(len(names))]
        for field, offset in zip(names, offsets, strict=True):
            row = {"domainId": domain, "schemaId": id_, "idx": 0, "type": 0, "name": field, "offset": offset}
            if row not in self.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"]:
                self.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"].append(row)

    def sample(self, metric: str, values: dict[int, int]) -> None:
        """Samples of a metric of GPU 0, by time."""
        described, type_id = self.rows["TARGET_INFO_GPU_METRICS"], 1 << 48  # whose low byte is the GPU's number
        row = {"typeId": type_id, "sourceId": 0, "typeName": "", "metricId": len(described), "metricName": metric}
        self.rows["GPU_METRICS"] += [
            {"timestamp": time, "typeId": type_id, "metricId": row["metricId"], "value": value}
            for time, value in values.items()
        ]
        described.append(row)

    def call(
        self, name: str, start: int, end: int, *, tid: int = TID, pid: int = PID, correlation: int | None = None,
        table: str = "CUPTI_ACTIVITY_KIND_RUNTIME",
    ) -> int:  # fmt: skip
        """Add an API call, or one of the operating system in ``OSRT_API``; returns its correlation id."""
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        row = {"start": start, "end": end, "eventClass": 0, "globalTid": thread(tid, pid), "nameId": self.string(name)}
        own = {"correlationId": correlation, "returnValue": 0} if table != "OSRT_API" else {"returnValue": 0}
        self.rows[table].append(row | own)
        return correlation

    def kernel(
        self, start: int, end: int, *, launched: tuple[int, int] | None = None, correlation: int | None = None,
        name: str = "gemm", device: int = 0, stream: int = 7, tid: int = TID, pid: int = PID, node: int | None = None,
        table: str = "KERNEL", grid: tuple[int, int, int] = (1, 1, 1), block: tuple[int, int, int] = (32, 1, 1),
        mangled: str | None = None, memory: tuple[int, int] = (7, 7), copy_kind: int = 1, size: int = 64,
    ) -> int:  # fmt: skip
        """A kernel (or, with `table`, a MEMCPY or MEMSET), launched by a call of its own or by the call of a
        correlation id. Its linker name is `mangled`, or else ``_Z`` and its name.
        """
        if launched is not None:
            correlation = self.call("cudaLaunchKernel_v7000", *launched, tid=tid, pid=pid, correlation=correlation)
        row: dict[str, object] = {"start": start, "end": end, "deviceId": device, "contextId": 1, "streamId": stream}
        row |= {"correlationId": correlation, "globalPid": thread(0, pid), "graphNodeId": node}
        if table == "KERNEL":
            linker_name = self.string(f"_Z{name}" if mangled is None else mangled)
            row |= {"demangledName": self.string(name), "shortName": self.string(name), "mangledName": linker_name}
            row |= {"registersPerThread": 16, "staticSharedMemory": 0, "dynamicSharedMemory": 1024}
            sizes = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
            row |= dict(zip(sizes, (*grid, *block), strict=True))
        else:
            row |= {"bytes": size, "copyKind": copy_kind, "srcKind": memory[0], "dstKind": memory[1]}
        self.rows[f"CUPTI_ACTIVITY_KIND_{table}"].append(row)
        return correlation or 0

    def carry(self, begin: tuple[int, int], end: tuple[int, int], *, peak: int = 0, tid: int = TID) -> None:
        """The marks of a range of a layer: (when, bytes) at its begin and its end, and its peak, if that is known."""
        marks = [("allocated at begin", *begin), ("allocated at end", *end)]
        for text, when, count in [*marks, *([("peak inside", end[0] - 1, peak)] if peak else [])]:
            self.range_(text, when, None, category="memory", payload=count, style=MARK, tid=tid)

    def allocation(self, when: int, count: int, correlation: int | None, *, kind: int = 2) -> None:
        """Bytes of the device that CUDA hands out, negative for a free, for the call with a correlation id."""
        row = {"start": when, "globalPid": thread(0), "deviceId": 0, "bytes": abs(count), "memKind": kind}
        row |= {"memoryOperationType": int(count < 0), "correlationId": correlation}
        self.rows["CUDA_GPU_MEMORY_USAGE_EVENTS"].append(row)

    def overhead(self, name: str, start: int, end: int) -> None:
        """Add profiler overhead on a thread."""
        row = {"start": start, "end": end, "globalTid": thread(), "nameId": self.string(name), "returnValue": 0}
        self.rows["PROFILER_OVERHEAD"].append(row)

    def graph_node(self, node: int, start: int, *, original: int | None = None, tid: int = TID, pid: int = PID) -> None:
        row = {"start": start, "end": start, "eventClass": 0, "globalTid": thread(tid, pid), "graphNodeId": node}
        self.rows[self.columns["NODES"]].append(row | {"originalGraphNodeId": original})

    def _table_columns(self, table: str) -> list[str]:
        listed = {
            "NVTX_EVENTS": self.columns["NVTX_EVENTS"],
            "CUPTI_ACTIVITY_KIND_RUNTIME": _RUNTIME,
            "CUPTI_ACTIVITY_KIND_KERNEL": self.columns["GPU"] + _KERNEL,
            "CUPTI_ACTIVITY_KIND_MEMCPY": self.columns["GPU"] + _COPY,
            "CUPTI_ACTIVITY_KIND_MEMSET": self.columns["GPU"] + _COPY,
            self.columns["NODES"]: _NODES,
        }
        return listed[table].split(", ") if table in listed else list(self.rows[table][0])

    def write(self) -> Path:
        """Write the file; tables without rows are left out, as nsys does. With NVPROF_KIT_TEST_FORM=parquet or arrow,
        the capture is a folder, so that any test runs on that form too.
        """
        self.path.unlink(missing_ok=True)
        with sqlite3.connect(self.path) as db:
            for table, rows in self.rows.items():
                columns = self._table_columns(table)
                db.execute(f"CREATE TABLE {table} ({', '.join(columns).replace('end,', '[end],')})")
                db.executemany(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
                    [[row.get(column) for column in columns] for row in rows],
                )
            db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
            db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(id_, text) for text, id_ in self.strings.items()])
            db.execute(f"CREATE TABLE {self.metadata} (name TEXT, value TEXT)")
            db.executemany(
                f"INSERT INTO {self.metadata} VALUES (?, ?)",
                [("EXPORT_PRODUCT_VERSION", f"{self.nsys}.0"), ("EXPORT_SCHEMA_VERSION", self.export_version)],
            )
            db.execute("CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, cuDevice INT)")
            db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?, 0)", (self.gpu,))
        db.close()
        if form := os.environ.get("NVPROF_KIT_TEST_FORM"):
            folder = self.path.with_suffix("")
            shutil.rmtree(folder, ignore_errors=True)
            return as_folder(self.path, folder, form)
        return self.path


KERNEL_TABLE = (
    "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, [end] INT, deviceId INT, correlationId INT, globalPid INT, "
    "demangledName INT, streamId INT DEFAULT 7, contextId INT DEFAULT 1, shortName INT DEFAULT 1, mangledName INT, "
    + ", ".join(f"{name} INT DEFAULT 1" for name in ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"))
    + ", registersPerThread INT DEFAULT 16, staticSharedMemory INT DEFAULT 0, dynamicSharedMemory INT DEFAULT 0)"
)
"""Kernels to be laid into a real export of a machine without a GPU: what is not said of one has a plain value."""
