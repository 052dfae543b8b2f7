"""A snapshot of the CUDA caching allocator (``torch.cuda.memory._dump_snapshot``) as tables."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.checks import check_moments, check_sizes
from nvprof_kit._trace.kinds import told_by
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import MEMORY_STRETCHES

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

_PICKLE = b"\x80"
_LATEST_US = 1 << 52
"""The year 2112; the allocator counts from 1970."""

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


class _Handed(pickle.Unpickler):
    """Loads what `load` handed over, which is plain data again."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot. Another process loads it (`nvprof_kit._trace.torch_memory.load`), so that neither the limits of
    that nor what the file asks for touches this one.

    Raises:
        CaptureError: The file cannot be read, is no pickle, holds anything but plain data, or is no snapshot.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise CaptureError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not head.startswith(_PICKLE) and (known := told_by(head)):
        raise CaptureError(f"{path}: {known}; needed a snapshot of torch.cuda.memory._dump_snapshot")
    return _snapshot(_loaded(path), path)


def _loaded(path: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("load.py").resolve()
    command = [sys.executable, "-I", str(script), str(path.resolve()), MEMORY_STRETCHES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            said: dict[str, Any] = _Handed(child.stdout).load()
        except (EOFError, pickle.UnpicklingError):
            said = {"error": "refused as a snapshot: loading it took more than the process that did so may take"}
        finally:
            child.kill()
    if "error" in said:
        raise CaptureError(f"{path}: {said['error']}")
    return said


def _snapshot(said: dict[str, Any], path: Path) -> Snapshot:
    import numpy as np
    import pandas as pd

    stacks: dict[int, Frames] = {}
    histories = []
    before = 0
    for device, history in enumerate(said["devices"]):
        numbers = np.frombuffer(history.pop("stack"), "int64")
        have = np.flatnonzero(numbers >= 0)
        found = map(said["stacks"].__getitem__, numbers[have].tolist())
        stacks.update(zip((have + before).tolist(), found, strict=True))
        wrong = np.abs(_integers(history["time_us"])) > _LATEST_US
        if wrong.any():
            raise CaptureError(
                f"{path}: device_traces.time_us is no time in {wrong.sum()} rows; take the snapshot again"
            )
        if len(numbers):
            histories.append(_events(history, device, said["stretches"]))
            before += len(numbers)
    events = pd.concat(histories, ignore_index=True) if histories else _no_events()
    if len(histories) > 1:
        events = events.astype({"action": "category", "label": "category"})
    size = events["size_bytes"].to_numpy()
    check_sizes(path, "device_traces.size", size)
    segments, blocks = _segments(said["segments"]), _blocks(said["segments"])
    for name in ("total_bytes", "allocated_bytes", "active_bytes"):
        check_sizes(path, f"segments.{name}", segments[name].to_numpy())
    check_sizes(path, "segments.blocks.size", blocks["size_bytes"].to_numpy())
    times = events["time_ns"].to_numpy()
    check_moments(path, [times[times > 0]])
    return Snapshot(str(path), events, segments, blocks, stacks, said["settings"])


def _integers(raw: bytes) -> Any:
    import numpy as np

    return np.frombuffer(raw, "int64")


def _texts(told: tuple[bytes, list[str]]) -> pd.Categorical:
    import pandas as pd

    return pd.Categorical.from_codes(_integers(told[0]), categories=pd.Index(told[1], dtype="str"))


def _no_events() -> pd.DataFrame:
    empty: dict[str, Any] = dict.fromkeys(("addr", "size", "stream", "time_us"), b"")
    return _events({**empty, "action": (b"", []), "label": (b"", [])}, 0, [])


def _events(history: dict[str, Any], device: int, stretches: list[tuple[int, str]]) -> pd.DataFrame:
    import pandas as pd

    time = _integers(history["time_us"])
    label = _texts(history["label"])
    table: pd.DataFrame = pd.DataFrame(
        {
            "device": device,
            "action": _texts(history["action"]),
            "addr": _integers(history["addr"]),
            "size_bytes": _integers(history["size"]),
            "stream": _integers(history["stream"]),
            "time_ns": time * 1000,
            "label": _labelled(label, time, stretches) if stretches else label,
        }
    )
    return table


def _labelled(label: pd.Categorical, time: Any, stretches: list[tuple[int, str]]) -> pd.Categorical:
    """The labels; an event without one gets that of the step and phase which the program was in."""
    import numpy as np
    import pandas as pd

    begins = np.array([begin for begin, _ in stretches], dtype=np.int64)
    texts = np.array(["", *(text for _, text in stretches)], dtype=object)
    told = np.asarray(label, dtype=object)
    own = told != ""
    labels = np.where(own, told, texts[np.searchsorted(begins, time, side="right")])
    codes, categories = pd.factorize(labels)
    return pd.Categorical.from_codes(codes, categories=pd.Index(categories, dtype="str"))


def _segments(said: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    made: pd.DataFrame = pd.DataFrame(
        {
            "device": _integers(said["device"]),
            "address": _integers(said["address"]),
            "total_bytes": _integers(said["total_size"]),
            "allocated_bytes": _integers(said["allocated_size"]),
            "active_bytes": _integers(said["active_size"]),
            "kind": _texts(said["kind"]),
            "stream": _integers(said["stream"]),
            "pool": _texts(said["pool"]),
        }
    )
    return made


def _blocks(said: dict[str, Any]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    counts, size = _integers(said["count"]), _integers(said["block_size"])
    segment = np.repeat(np.arange(len(counts)), counts)
    if said["block_address"] is not None:
        address = _integers(said["block_address"])
    else:  # PyTorch up to 2.1 left it to be counted up
        before = np.cumsum(size) - size
        first = np.cumsum(counts) - counts
        begin = before[first[segment]] if len(size) else before
        address = _integers(said["address"])[segment] + before - begin
    made: pd.DataFrame = pd.DataFrame(
        {
            "segment": segment,
            "address": address,
            "size_bytes": size,
            "requested_bytes": _integers(said["block_requested"]),
            "state": _texts(said["block_state"]),
        }
    )
    return made
