"""CUDA API calls and the profiler's own interruptions of a PyTorch trace, and what memory its copies touch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nvprof_kit.trace.kineto_events import Events, numbers, threads, times
from nvprof_kit.trace.schema import CALL_KINDS

_KINDS = {"cuda_runtime": "api", "cuda_driver": "api", "overhead": "overhead"}
_HOST_END = re.compile(r"\((?:.*\b)?(Pageable|Pinned|Managed)\b")


def read_calls(events: Events, process: int) -> dict[str, Any]:
    """Columns of the schema's ``calls``: every CUDA runtime and driver call, and every overhead of the profiler."""
    found = [(kind, event) for category, kind in _KINDS.items() for event in events.by_category.get(category, [])]
    found += [("operator", event) for event in events.operators]
    chosen = [event for _, event in found]
    start, end = times(chosen)
    return {
        "start_ns": start,
        "end_ns": end,
        "tid": threads(chosen),
        "pid": np.full(len(chosen), process, dtype=np.int64),
        "correlation": numbers(chosen, "correlation"),
        "kind": np.array([CALL_KINDS.index(kind) for kind, _ in found], dtype=np.int8),
        "name": [str(event.get("name", "")) for event in chosen],
    }


def host_memory(name: str) -> str:
    """The host's end of a copy from its name: ``Memcpy HtoD (Pageable -> Device)`` gives ``pageable``."""
    found = _HOST_END.search(name)
    return found.group(1).lower() if found else ""
