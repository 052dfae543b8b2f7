"""A snapshot of the CUDA caching allocator (``torch.cuda.memory._dump_snapshot``) as tables."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.annotations import loop_annotation
from nvprof_kit._trace.files.kinds import description_of
from nvprof_kit._trace.reader import Request, Source
from nvprof_kit._trace.schema import LARGEST_BYTES
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import (
    MEMORY_SPANS,
    Category,
    kineto_name,
    memory_label,
    parse_memory_label,
    step_number,
)

if TYPE_CHECKING:
    import pandas as pd

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "device": "device ordinal (int64)",
        "action": "alloc, free_requested, free_completed, segment_alloc, segment_free, oom, … (category)",
        "addr": "address; 0 for an oom (int64)",
        "size_bytes": "requested bytes (int64)",
        "stream": "stream of the allocation (int64)",
        "time_ns": "time in ns since 1970, 0 if not recorded (int64)",
        "label": "annotation that was open, with layer and phase; '' if none (category)",
    }
)
"""Columns of `Snapshot.events`; rows in the order of each device's events."""

SEGMENTS: Mapping[str, str] = MappingProxyType(
    {
        "device": "device ordinal (int64)",
        "address": "start address (int64)",
        "total_bytes": "size as reserved from CUDA (int64)",
        "allocated_bytes": "the part in allocated blocks (int64)",
        "active_bytes": "the part in allocated blocks, or waiting for a stream before it is freed (int64)",
        "kind": "small, large, or expandable (category)",
        "stream": "stream that it belongs to (int64)",
        "pool": "memory pool; (0, 0) is the default pool (category)",
    }
)
"""Columns of `Snapshot.segments`: memory reserved from CUDA at the time of the snapshot."""

BLOCKS: Mapping[str, str] = MappingProxyType(
    {
        "segment": "row of its segment (int64)",
        "address": "start address (int64)",
        "size_bytes": "size (int64)",
        "requested_bytes": "requested size, before rounding (int64)",
        "state": "active_allocated, active_pending_free, or inactive (category)",
    }
)
"""Columns of `Snapshot.blocks`: the division of the segments at the time of the snapshot."""

_LATEST_US = 1 << 52
"""The year 2112; allocator times count from 1970."""

_Stretches = list[tuple[int, str]]

Frames = list[dict[str, Any]]
"""A call stack, innermost first, each frame with filename, line and name."""


class Stacks(Mapping[int, Frames]):
    """The call stack of each event that has one, by row; stacks are built on access.

    Args:
        of_event: Number of each event's stack; -1 if none.
        codes: Frame numbers of all stacks, concatenated.
        lengths: Length of each stack.
        frames: The frames.
    """

    def __init__(self, of_event: Any, codes: Any, lengths: Any, frames: Frames) -> None:
        self._of_event, self._codes, self._frames = of_event, codes, frames
        self._ends = lengths.cumsum()
        self._lengths = lengths

    def __getitem__(self, row: int) -> Frames:
        number = self._of_event[row] if 0 <= row < len(self._of_event) else -1
        if number < 0:
            raise KeyError(row)
        end = self._ends[number]
        return [self._frames[code] for code in self._codes[end - self._lengths[number] : end].tolist()]

    def __iter__(self) -> Iterator[int]:
        return iter((self._of_event >= 0).nonzero()[0].tolist())

    def __len__(self) -> int:
        return int((self._of_event >= 0).sum())


@dataclass(frozen=True)
class Snapshot:
    """The state and history of the allocator.

    Attributes:
        path: The file as given by the user.
        events: The history; columns `EVENTS`.
        segments: Memory reserved from CUDA; columns `SEGMENTS`.
        blocks: The parts of the segments; columns `BLOCKS`.
        stacks: The call stack of each ``alloc`` event, by its row in `events`; empty if not recorded.
        settings: The allocator's settings.
    """

    path: str
    events: pd.DataFrame
    segments: pd.DataFrame
    blocks: pd.DataFrame
    stacks: Mapping[int, Frames] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)


class SnapshotReader:
    """A snapshot. A child process loads it (`nvprof_kit._trace.torch_memory.load`), so that neither its limits nor the
    file's resource use affects this process.
    """

    def sniff(self, path: Path, header: bytes) -> bool:
        """Whether a path may be of this format."""
        return not path.is_dir() and (header.startswith(b"\x80") or not description_of(header))

    def read(self, source: Source, request: Request) -> Snapshot:
        """Read a snapshot.

        Raises:
            CaptureError: The file is not a pickle, contains more than plain data, or is not a snapshot.
        """
        return _snapshot(_loaded(source), source.named)


class _PlainUnpickler(pickle.Unpickler):
    """Loads the output of the child process, which is plain data too."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")


def _loaded(source: Source) -> dict[str, Any]:
    """The columns of a snapshot. An untrusted pickle can run arbitrary code when it is loaded, so a child process with
    limits of memory and time does it, by an unpickler that refuses all classes and functions.
    """
    # -I: import nothing from the current folder or the environment
    script = Path(__file__).with_name("load.py").resolve()
    command = [sys.executable, "-I", str(script), str(source.path.resolve()), MEMORY_SPANS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            import pandas  # noqa: F401 - needed for the tables later; the import overlaps with the child process

            content: dict[str, Any] = _PlainUnpickler(child.stdout).load()
        except (EOFError, pickle.UnpicklingError):
            content = {
                "error": "refused as a snapshot: loading it takes more time or memory than its size accounts for"
            }
        finally:
            child.kill()
    if "error" in content:
        raise CaptureError(f"{source.named}: {content['error']}")
    return content


def _snapshot(content: dict[str, Any], path: Path) -> Snapshot:
    import numpy as np
    import pandas as pd

    from nvprof_kit._trace.validate import check_bounds, check_moments

    histories, numbers = [], [np.zeros(0, dtype=np.int64)]
    for device, history in enumerate(content["devices"]):
        stack = _integers(history.pop("stack"))
        wrong = np.abs(_integers(history["time_us"])) > _LATEST_US
        if wrong.any():
            raise CaptureError(
                f"{path}: device_traces.time_us is not a time in {wrong.sum()} rows; take the snapshot again"
            )
        if len(stack):
            numbers.append(stack)
            on_device = [
                (time, is_start, name) for time, where, is_start, name in content["annotations"] if where == device
            ]
            histories.append(_events(history, device, content["stretches"], _loop_stretches(on_device)))
    if not histories:
        empty: dict[str, Any] = dict.fromkeys(("addr", "size", "stream", "time_us"), b"")
        histories = [_events({**empty, "action": (b"", []), "label": (b"", [])}, 0, [], [])]
    events = pd.concat(histories, ignore_index=True)
    if len(histories) > 1:
        events = events.astype({"action": "category", "label": "category"})
    segments, blocks = _segments(content["segments"]), _blocks(content["segments"])
    sizes = {"device_traces.size": events["size_bytes"], "segments.blocks.size": blocks["size_bytes"]}
    sizes |= {f"segments.{name}": segments[name] for name in ("total_bytes", "allocated_bytes", "active_bytes")}
    for name, size in sizes.items():
        check_bounds(f"{path}: {name}", size.to_numpy(), 0, LARGEST_BYTES)
    times = events["time_ns"].to_numpy()
    check_moments(path, [times[times > 0]])
    codes, lengths = (_integers(raw) for raw in content["stacks"])
    stacks = Stacks(np.concatenate(numbers), codes, lengths, content["frames"])
    return Snapshot(str(path), events, segments, blocks, stacks, content["settings"])


def _integers(raw: bytes) -> Any:
    import numpy as np

    return np.frombuffer(raw, "int64")


def _texts(encoded: tuple[bytes, list[str]]) -> pd.Categorical:
    import pandas as pd

    return pd.Categorical.from_codes(_integers(encoded[0]), categories=pd.Index(encoded[1], dtype="str"))


def _events(history: dict[str, Any], device: int, marks: _Stretches, annotated: _Stretches) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    time = _integers(history["time_us"])
    label = _texts(history["label"])
    if marks or annotated:
        # An event without a label gets the program's current step and phase; a label without layer and phase is
        # completed from PyTorch's annotations around the event. By codes, because a million events have only a few
        # hundred distinct texts.
        places = [np.searchsorted([start for start, _ in lane], time, side="right") for lane in (marks, annotated)]
        key = (label.codes.astype(np.int64) * (len(marks) + 1) + places[0]) * (len(annotated) + 1) + places[1]
        code_of_row, distinct = pd.factorize(key)
        own_code, mark_codes = np.divmod(distinct, (len(marks) + 1) * (len(annotated) + 1))
        texts = [
            _joined(
                label.categories[code] or ("", *(text for _, text in marks))[first],
                ("", *(text for _, text in annotated))[second],
            )
            for code, first, second in zip(
                own_code.tolist(),
                *(codes_of_part.tolist() for codes_of_part in np.divmod(mark_codes, len(annotated) + 1)),
                strict=True,
            )
        ]
        codes, categories = pd.factorize(np.array(texts, dtype=object))
        label = pd.Categorical.from_codes(codes[code_of_row], categories=pd.Index(categories, dtype="str"))
    table: pd.DataFrame = pd.DataFrame(
        {
            "device": device,
            "action": _texts(history["action"]),
            "addr": _integers(history["addr"]),
            "size_bytes": _integers(history["size"]),
            "stream": _integers(history["stream"]),
            "time_ns": time * 1000,
            "label": label,
        }
    )
    return table


def _joined(label: str, annotated: str) -> str:
    """A label, completed from the annotations."""
    (name, step), (phase, number) = parse_memory_label(label), parse_memory_label(annotated)
    return label if name and step is not None else memory_label(name or phase, number if step is None else step)


def _loop_stretches(annotations: list[tuple[int, bool, str]]) -> _Stretches:
    """Start times of phases and steps annotated by PyTorch, and the label of allocations from then on: the innermost
    open phase and step.
    """
    annotation_of_name = {
        name: annotation for name in {name for _, _, name in annotations} if (annotation := loop_annotation(name))
    }
    opened: list[str] = []
    labels: _Stretches = []
    for time, is_start, name in sorted(
        (row for row in annotations if row[2] in annotation_of_name), key=lambda row: (row[0], row[1])
    ):
        if is_start:
            opened.append(name)
        elif name in opened:
            del opened[len(opened) - 1 - opened[::-1].index(name)]
        steps = [number for open_name in opened if (number := step_number(open_name)) is not None]
        phases = [
            kineto_name(text, Category(kind))
            for text, kind in map(annotation_of_name.__getitem__, opened)
            if kind != "step"
        ]
        labels.append((time, memory_label(phases[-1] if phases else "", steps[-1] if steps else None)))
    return labels


def _segments(columns: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    segments: pd.DataFrame = pd.DataFrame(
        {
            "device": _integers(columns["device"]),
            "address": _integers(columns["address"]),
            "total_bytes": _integers(columns["total_size"]),
            "allocated_bytes": _integers(columns["allocated_size"]),
            "active_bytes": _integers(columns["active_size"]),
            "kind": _texts(columns["kind"]),
            "stream": _integers(columns["stream"]),
            "pool": _texts(columns["pool"]),
        }
    )
    return segments


def _blocks(columns: dict[str, Any]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    counts, size = _integers(columns["count"]), _integers(columns["block_size"])
    segment = np.repeat(np.arange(len(counts)), counts)
    if columns["block_address"] is not None:
        address = _integers(columns["block_address"])
    else:  # PyTorch up to 2.1 has no address: sum up the sizes
        before = np.cumsum(size) - size
        first = np.cumsum(counts) - counts
        segment_start = before[first[segment]] if len(size) else before
        address = _integers(columns["address"])[segment] + before - segment_start
    blocks: pd.DataFrame = pd.DataFrame(
        {
            "segment": segment,
            "address": address,
            "size_bytes": size,
            "requested_bytes": _integers(columns["block_requested"]),
            "state": _texts(columns["block_state"]),
        }
    )
    return blocks
