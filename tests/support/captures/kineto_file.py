"""Tiny PyTorch traces, times in µs."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def event(
    category: str, name: str, start: float, length: float, *, pid: int = 1, tid: int = 1, **arguments: Any
) -> Event:
    times = {"ts": start, "dur": length}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": arguments}


def kernel(name: str, start: float, length: float, launch: float, id_: int, **arguments: Any) -> list[Event]:
    """A kernel, and its launch of 10 µs."""
    where = {"correlation": id_, "device": 0, "stream": 7}
    call = event("cuda_runtime", "cudaLaunchKernel", launch, 10, correlation=id_)
    return [call, event("kernel", name, start, length, pid=0, tid=7, **{**where, **arguments})]


def write(path: Path, events: Iterable[Event], **more: Any) -> Path:
    """Write a trace, packed if it is named ``.gz``, with more keys beside the events."""
    text = json.dumps({"traceEvents": [*events], **more}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
