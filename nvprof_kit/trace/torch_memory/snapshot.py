"""A snapshot of the CUDA caching allocator (``torch.cuda.memory._dump_snapshot``) as tables.

A snapshot is a pickle, and is read as plain data: see `plain_pickle`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nvprof_kit.errors import CaptureError
from nvprof_kit.names import MEMORY_STRETCHES
from nvprof_kit.trace.plain_pickle import load_plain, one_line

if TYPE_CHECKING:
    import pandas as pd

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "device": "device ordinal (int64)",
        "action": "alloc, free_requested, free_completed, segment_alloc, segment_free, oom, … (category)",
        "addr": "address; 0 for an oom (int64)",
        "size_bytes": "bytes, as asked for (int64)",
        "stream": "stream it was asked for on (int64)",
        "time_ns": "when, ns since 1970; 0 where the snapshot has no times (int64)",
        "label": "what the program said it was doing, '' where it said nothing (category)",
    }
)
"""Columns of `Snapshot.events`; rows in the order of each device's events."""

SEGMENTS: Mapping[str, str] = MappingProxyType(
    {
        "device": "device ordinal (int64)",
        "address": "where it begins (int64)",
        "total_bytes": "its size, as reserved from CUDA (int64)",
        "allocated_bytes": "of it in tensors (int64)",
        "active_bytes": "of it in tensors, or waiting for a stream to be done with it (int64)",
        "kind": "small, large, or expandable (category)",
        "stream": "the stream it serves (int64)",
        "pool": "the pool it belongs to; (0, 0) is the default one (category)",
    }
)
"""Columns of `Snapshot.segments`: what is reserved from CUDA when the snapshot is taken."""

BLOCKS: Mapping[str, str] = MappingProxyType(
    {
        "segment": "row of its segment (int64)",
        "address": "where it begins (int64)",
        "size_bytes": "its size (int64)",
        "requested_bytes": "what was asked for, before rounding (int64)",
        "state": "active_allocated, active_pending_free, or inactive (category)",
    }
)
"""Columns of `Snapshot.blocks`: how the segments are divided when the snapshot is taken."""

Frames = list[dict[str, Any]]
"""A call stack, innermost first, each frame with filename, line and name."""


@dataclass(frozen=True)
class Snapshot:
    """What the allocator held and did.

    Attributes:
        path: The file as it was named.
        events: The history, with the columns of `EVENTS`.
        segments: With the columns of `SEGMENTS`.
        blocks: With the columns of `BLOCKS`.
        stacks: The call stack of each ``alloc`` event, by its row in `events`; empty where none was recorded.
        settings: The allocator's settings.
    """

    path: str
    events: pd.DataFrame
    segments: pd.DataFrame
    blocks: pd.DataFrame
    stacks: Mapping[int, Frames] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot.

    Raises:
        CaptureError: The file cannot be read, is no pickle, holds anything but plain data, or is no snapshot.
    """
    path = Path(path)
    collecting = gc.isenabled()
    gc.disable()  # a million dicts that stay are searched for cycles again and again
    try:
        plain = _load(path)
        return _tables(plain, path)
    finally:
        if collecting:
            gc.enable()


def _load(path: Path) -> dict[str, Any]:
    plain = load_plain(path, "snapshot")
    if not isinstance(plain, dict) or not {"segments", "device_traces"} <= plain.keys():
        raise CaptureError(
            f"{path}: a pickle, but no snapshot of the CUDA allocator: needed segments and device_traces, as "
            "torch.cuda.memory._dump_snapshot and nvprof_kit.memory_snapshot write them"
        )
    return plain


def _tables(plain: dict[str, Any], path: Path) -> Snapshot:
    import pandas as pd

    try:
        histories = []
        stacks: dict[int, Frames] = {}
        before = 0
        traces = plain["device_traces"]
        for device in range(len(traces)):
            history, traces[device] = traces[device], None  # let go of each device's events as they become columns
            if history:
                histories.append(_events(history, device, plain.get(MEMORY_STRETCHES) or []))
                _keep_stacks(history, before, stacks)
                before += len(history)
        events = pd.concat(histories, ignore_index=True) if histories else _events([], 0, [])
        if len(histories) > 1:
            events = events.astype({"action": "category", "label": "category"})
        segments, blocks = _segments(plain["segments"]), _blocks(plain["segments"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        why = f"{type(error).__name__} {one_line(error)}"
        raise CaptureError(f"{path}: a snapshot with parts that cannot be understood ({why})") from None
    return Snapshot(str(path), events, segments, blocks, stacks, plain.get("allocator_settings") or {})


def _events(history: list[dict[str, Any]], device: int, stretches: list[tuple[int, str]]) -> pd.DataFrame:
    import pandas as pd

    time = _integers(history, "time_us")
    labels = [event.get("user_metadata") or "" for event in history]
    if stretches:
        _label_by_time(labels, time, stretches)
    table: pd.DataFrame = pd.DataFrame(
        {
            "device": device,
            "action": _texts(map(itemgetter("action"), history)),
            "addr": _integers(history, "addr"),
            "size_bytes": _integers(history, "size"),
            "stream": _integers(history, "stream"),
            "time_ns": time * 1000,
            "label": _texts(labels),
        }
    )
    return table


def _label_by_time(labels: list[str], time: Any, stretches: list[tuple[int, str]]) -> None:
    """Give the events without a label that of the step and phase which the program was in."""
    import numpy as np

    begins = np.array([begin for begin, _ in stretches], dtype=np.int64)
    places = np.searchsorted(begins, time, side="right") - 1
    for number, label in enumerate(labels):
        if not label and places[number] >= 0:
            labels[number] = stretches[places[number]][1]


def _texts(texts: Iterable[Any]) -> pd.Categorical:
    """Texts as a categorical, its categories in the order of their first appearance."""
    import numpy as np
    import pandas as pd

    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(text, len(numbers)) for text in texts]
    categories = pd.Index([str(text) for text in numbers], dtype="str")
    return pd.Categorical.from_codes(np.array(codes, dtype="int64"), categories=categories)


def _integers(rows: list[dict[str, Any]], name: str) -> Any:
    import numpy as np

    try:
        return np.fromiter(map(itemgetter(name), rows), "int64", len(rows))
    except KeyError:
        return np.fromiter((row.get(name, 0) for row in rows), "int64", len(rows))


def _keep_stacks(history: list[dict[str, Any]], before: int, stacks: dict[int, Frames]) -> None:
    for number, event in enumerate(history, before):
        if event["action"] == "alloc" and event.get("frames"):
            stacks[number] = event["frames"]


def _segments(segments: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    kinds = ["expandable" if segment.get("is_expandable") else segment["segment_type"] for segment in segments]
    made: pd.DataFrame = pd.DataFrame(
        {
            "device": _integers(segments, "device"),
            "address": _integers(segments, "address"),
            "total_bytes": _integers(segments, "total_size"),
            "allocated_bytes": _integers(segments, "allocated_size"),
            "active_bytes": _integers(segments, "active_size"),
            "kind": _texts(kinds),
            "stream": _integers(segments, "stream"),
            "pool": _texts(str(tuple(segment.get("segment_pool_id", (0, 0)))) for segment in segments),
        }
    )
    return made


def _blocks(segments: list[dict[str, Any]]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    counts = [len(segment["blocks"]) for segment in segments]
    blocks = [block for segment in segments for block in segment["blocks"]]
    size = _integers(blocks, "size")
    if blocks and all("address" in block for block in blocks):
        address = _integers(blocks, "address")
    else:  # PyTorch up to 2.1 left it to be counted up
        address = _counted_up(segments)
    requested = [block.get("requested_size", block["size"]) for block in blocks]
    made: pd.DataFrame = pd.DataFrame(
        {
            "segment": np.repeat(np.arange(len(segments)), counts),
            "address": address,
            "size_bytes": size,
            "requested_bytes": np.array(requested, dtype="int64"),
            "state": _texts(block["state"] for block in blocks),
        }
    )
    return made


def _counted_up(segments: list[dict[str, Any]]) -> Any:
    import numpy as np

    addresses = []
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            addresses.append(at)
            at += block["size"]
    return np.array(addresses, dtype="int64")
