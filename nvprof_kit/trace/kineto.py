"""A PyTorch profiler (Kineto) trace as a `Trace`, with our ranges in it or without.

A trace without a GPU has no kernels; there the operations are the stretches in which a CPU operator itself runs,
and not one it calls. Times in the file are microseconds with three decimals and become whole nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit.errors import CaptureError
from nvprof_kit.names import DOMAIN, Category, parse_kineto_name, parse_range
from nvprof_kit.trace.frames import MISSING_PAYLOAD, empty_frame, make_frame
from nvprof_kit.trace.schema import OP_KINDS, CaptureInfo, Trace

Event = dict[str, Any]
Int64Array = npt.NDArray[np.int64]

_GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_API_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
_ANNOTATION, _CPU_OP, _PYTHON = "user_annotation", "cpu_op", "python_function"
_OURS = f"{DOMAIN}:"
_BACKWARD_OP = "autograd::engine::evaluate_function"
_MODULE = "nn.Module: "
_LIBRARY_ANNOTATIONS = (
    "nccl:",
    "c10d::",
    "gloo:",
    "##",
    "Torch-Compiled Region",
    "DistributedDataParallel.",
    "FSDP::",
    "PyTorch Profiler",
)
_LOOP_ANNOTATIONS = {
    "Optimizer.step#": ("optimizer", Category.OPTIMIZER),
    "Optimizer.zero_grad#": ("zero_grad", Category.OPTIMIZER),
    "enumerate(DataLoader)#": ("data", Category.DATA),
}


def read_kineto(path: Path, domain: str, optional: Collection[str], named: Path) -> Trace:
    """Read a Kineto trace, plain or gzipped.

    Args:
        path: The file.
        domain: Must be our own domain: Kineto knows no NVTX domains.
        optional: Optional columns wanted.
        named: The path to name in messages.

    Raises:
        CaptureError: The file is cut off, is no Kineto trace, or holds no operation.
    """
    if domain != DOMAIN:
        raise CaptureError(
            f"{named}: a PyTorch trace has no NVTX domains, so --domain {domain!r} cannot be found in it; "
            "leave --domain out"
        )
    whole = _load(path, named)
    by_category = _by_category(whole["traceEvents"])
    on_gpu = any(by_category.get(category) for category in _GPU_CATEGORIES)
    process = _process(by_category, named)
    if on_gpu:
        ops, api = _gpu_ops(by_category, process, optional), _launches(by_category, process)
    else:
        ops, api = _cpu_ops(by_category[_CPU_OP], process, optional)
    ranges = _ranges(by_category, process)
    return Trace(
        info=CaptureInfo(
            path=str(named),
            tool="PyTorch profiler (Kineto)",
            schema=str(whole.get("schemaVersion", "")),
            domain=DOMAIN,
            gpus=_gpu_names(whole, np.unique(ops["device"])) if on_gpu else (),
            on_gpu=on_gpu,
            doubts=()
            if on_gpu
            else (
                "no GPU operations in this trace: the operations are CPU operators, each counted while none "
                "that it calls is running",
            ),
        ),
        ranges=make_frame("ranges", ranges) if len(ranges["start_ns"]) else empty_frame("ranges"),
        api=make_frame("api", api),
        ops=make_frame("ops", ops),
        graph_nodes=empty_frame("graph_nodes"),
    )


def _load(path: Path, named: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            whole = json.load(file)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise CaptureError(f"{named}: the gzip file is cut off or damaged; record it again or copy it again") from None
    except json.JSONDecodeError as error:
        raise CaptureError(
            f"{named}: the JSON is cut off or damaged at character {error.pos}: the program ended before the "
            "trace was whole; record it again"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"{named}: not readable as JSON ({error}); needed a PyTorch profiler trace") from None
    whole = {"traceEvents": whole} if isinstance(whole, list) else whole
    if not isinstance(whole, dict) or not isinstance(whole.get("traceEvents"), list):
        raise CaptureError(
            f"{named}: JSON, but no trace (no traceEvents); needed what torch.profiler's export_chrome_trace writes"
        )
    return whole


def _by_category(events: Iterable[Any]) -> dict[str, list[Event]]:
    """The complete ("X") events by category; older versions wrote the categories with capitals."""
    found: dict[str, list[Event]] = {}
    older = {"operator": _CPU_OP, "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and "ts" in event:
            category = str(event.get("cat", "")).lower()
            ours = str(event.get("name", "")).startswith(
                _OURS
            )  # the recorder emits them as operators, which costs it least
            found.setdefault(_ANNOTATION if ours else older.get(category, category), []).append(event)
    return found


def _process(by_category: dict[str, list[Event]], named: Path) -> int:
    """The process that was traced; the events of the GPU bear the device's number instead."""
    for category in (*_API_CATEGORIES, _CPU_OP, _ANNOTATION):
        if by_category.get(category):
            return _number(by_category[category][0].get("pid"))
    raise CaptureError(
        f"{named}: a trace without operators, CUDA calls or kernels; record with nvprof_kit.record or "
        "torch.profiler with CPU (and CUDA) activities"
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) else int(value) if str(value).lstrip("-").isdecimal() else 0


def _times(events: list[Event]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    start = np.rint(np.array([event["ts"] for event in events], dtype=np.float64) * 1000).astype(np.int64)
    length = np.rint(np.array([event.get("dur", 0) for event in events], dtype=np.float64) * 1000).astype(np.int64)
    return start, start + length


def _numbers(events: list[Event], name: str, missing: int = -1) -> npt.NDArray[np.int64]:
    """One of the arguments of the events."""
    return np.array([_number(event.get("args", {}).get(name, missing)) for event in events], dtype=np.int64)


def _threads(events: list[Event]) -> npt.NDArray[np.int64]:
    return np.array([_number(event.get("tid")) for event in events], dtype=np.int64)


# ---------------------------------------------------------------- operations


def _gpu_ops(by_category: dict[str, list[Event]], process: int, optional: Collection[str]) -> dict[str, Any]:
    events = [event for category in _GPU_CATEGORIES for event in by_category.get(category, [])]
    kinds = [kind for category, kind in _GPU_CATEGORIES.items() for _ in by_category.get(category, [])]
    start, end = _times(events)
    ops: dict[str, Any] = {
        "start_ns": start,
        "end_ns": end,
        "device": _numbers(events, "device", 0),
        "pid": np.full(len(events), process, dtype=np.int64),
        "correlation": _numbers(events, "correlation"),
        "graph_node": np.where((nodes := _numbers(events, "graph node id")) > 0, nodes, -1),
        "kind": np.array([OP_KINDS.index(kind) for kind in kinds], dtype=np.int8),
    }
    return ops | _optional(events, optional)


def _optional(events: list[Event], optional: Collection[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "name" in optional:
        made["name"] = [str(event.get("name", "")) for event in events]
    for column in ("stream", "bytes"):
        if column in optional:
            made[column] = _numbers(events, column)
    return made


def _launches(by_category: dict[str, list[Event]], process: int) -> dict[str, Any]:
    events = [
        event
        for category in _API_CATEGORIES
        for event in by_category.get(category, [])
        if "correlation" in event.get("args", {})
    ]
    return {
        "start_ns": _times(events)[0],
        "tid": _threads(events),
        "pid": np.full(len(events), process, dtype=np.int64),
        "correlation": _numbers(events, "correlation"),
    }


def _cpu_ops(events: list[Event], process: int, optional: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What CPU operators did themselves, and for each stretch the "call" that launched it: its own begin on its
    own thread.

    ``aten::addmm`` multiplies, but calls ``aten::expand`` on the way: its time is what lies around that, so that
    nothing is lost and nothing counts twice.
    """
    start, end = _times(events)
    tid = _threads(events)
    operator, begin, finish = _own_stretches(start, end, tid)
    ids = np.arange(len(operator), dtype=np.int64)
    process_of = np.full(len(operator), process, dtype=np.int64)
    ops = {
        "start_ns": begin,
        "end_ns": finish,
        "device": np.zeros(len(operator), dtype=np.int64),
        "pid": process_of,
        "correlation": ids,
        "graph_node": np.full(len(operator), -1, dtype=np.int64),
        "kind": np.full(len(operator), OP_KINDS.index("operator"), dtype=np.int8),
    }
    api = {"start_ns": begin, "tid": tid[operator], "pid": process_of, "correlation": ids}
    return ops | _optional([events[one] for one in operator.tolist()], optional), api


def _own_stretches(start: Int64Array, end: Int64Array, tid: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The stretches in which each operator is the innermost one on its thread: operator, begin and end, shape
    ``(n,)`` each.
    """
    found: list[tuple[int, int, int]] = []
    open_operators: list[int] = []
    now = 0

    def run_until(moment: float) -> None:
        nonlocal now
        while open_operators and now < moment:
            innermost = open_operators[-1]
            until = int(min(end[innermost], moment))
            if until > now:
                found.append((innermost, now, until))
                now = until
            if end[innermost] <= moment:
                open_operators.pop()

    thread: int | None = None
    for operator in np.lexsort((-end, start, tid)).tolist():
        run_until(start[operator] if tid[operator] == thread else math.inf)
        thread, now = tid[operator], int(start[operator])
        open_operators.append(operator)
    run_until(math.inf)
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _gpu_names(whole: dict[str, Any], devices: npt.NDArray[np.int64]) -> tuple[str, ...]:
    known = {
        _number(one.get("id")): str(one.get("name", ""))
        for one in whole.get("deviceProperties", [])
        if isinstance(one, dict)
    }
    return tuple(known.get(int(device), "GPU of unknown name") for device in devices)


# ---------------------------------------------------------------- ranges


def _ranges(by_category: dict[str, list[Event]], process: int) -> dict[str, Any]:
    """Our ranges; in a trace without them what PyTorch itself annotates: modules, steps, optimizer, data loading,
    backward.
    """
    annotations = by_category.get(_ANNOTATION, [])
    ours = [(event, *found) for event in annotations if (found := parse_kineto_name(str(event.get("name", ""))))]
    if ours:
        have = {category for _, _, category in ours}
        loop = [(event, *found) for event in annotations if (found := _loop_annotation(str(event.get("name", ""))))]
        chosen = ours + [one for one in loop if one[2] not in have]
    else:
        backward = [
            (event, "backward", Category.PHASE.value)
            for event in by_category.get(_CPU_OP, [])
            if str(event.get("name", "")).startswith(_BACKWARD_OP)
        ]
        modules = [
            (event, str(event["name"])[len(_MODULE) :], Category.FORWARD.value)
            for event in by_category.get(_PYTHON, [])
            if str(event.get("name", "")).startswith(_MODULE)
        ]
        named = [(event, *_plain_annotation(str(event.get("name", "")))) for event in annotations]
        chosen = [one for one in named if one[1]] + backward + modules
    events = [event for event, _, _ in chosen]
    start, end = _times(events)
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": np.full(len(events), process, dtype=np.int64),
        "tid": _threads(events),
        "nested": np.ones(len(events), dtype=bool),
        "left_open": np.zeros(len(events), dtype=bool),
        "category": [category for _, _, category in chosen],
        "text": [text for _, text, _ in chosen],
        "payload": np.full(len(events), MISSING_PAYLOAD, dtype=np.int64),
    }


def _loop_annotation(name: str) -> tuple[str, str] | None:
    """Text and category of what PyTorch annotates of the loop by itself, and of a step or phase the user annotated."""
    for prefix, (text, category) in _LOOP_ANNOTATIONS.items():
        if name.startswith(prefix):
            return text, category.value
    plain = parse_range(name)
    return (name, plain.category.value) if plain.category in (Category.STEP, Category.PHASE) else None


def _plain_annotation(name: str) -> tuple[str, str]:
    """The same for any annotation of a trace without our ranges: what is not of the loop is a layer, a library's
    own is nothing.
    """
    if name.startswith(_LIBRARY_ANNOTATIONS):
        return "", Category.USER.value
    plain = parse_range(name)
    return _loop_annotation(name) or (plain.text, plain.category.value)
