"""Load a snapshot in a separate process and print its columns as a pickle.

`nvprof_kit._trace.torch_memory.snapshot` starts it.

An untrusted pickle can run arbitrary code when loaded, and a small one can use any amount of memory and time. It is
therefore loaded with an unpickler that rejects all classes and functions, in a process with limited memory that imports
only the standard library. The type of every value is checked before it is traversed; lists that share their parts many
times over are rejected.

The output on stdout is a pickle of numbers, text, lists and dicts: a column is the bytes of 64-bit integers, or these
and the distinct texts that they number.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any

_ROOM = 2 << 30
_ROOM_PER_BYTE = 60
"""Memory limit for loading, fixed and per byte of the file: more than any real file needs."""
_SECONDS = 10
_BYTES_PER_SECOND = 2 << 20
"""CPU time limit, fixed and per number of bytes: a real file of 128 MB takes two seconds."""
_MAX_FRAMES = 2000
_MAX_LETTERS = 2000

_EVENTS_AT_ONCE = 512
"""Few enough that they stay in the processor's cache while their columns are made."""

_EVENTS = {"addr": ("addr", 0), "size_bytes": ("size", None), "stream": ("stream", 0), "time_us": ("time_us", 0)}
"""The integers of events, by column: the key in the file, and what stands for those that an event may lack."""
_SEGMENTS = {
    "device": "device",
    "address": "address",
    "total_bytes": "total_size",
    "allocated_bytes": "allocated_size",
    "active_bytes": "active_size",
    "stream": "stream",
}
"""The integers of segments, which lack none, by column: the key in the file."""


class _Refused(Exception):
    pass


class PlainUnpickler(pickle.Unpickler):
    """Loads plain data and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse to load a class or function."""
        raise pickle.UnpicklingError(f"it would load {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse to load an object from elsewhere."""
        raise pickle.UnpicklingError("it refers to objects outside of it")


def main(path: str, spans_key: str) -> None:
    """Print the columns of a snapshot, or a one-line error. The key `spans_key` has what this package added."""
    size = os.path.getsize(path)
    _limit(resource.RLIMIT_AS, _ROOM + _ROOM_PER_BYTE * size)
    _limit(resource.RLIMIT_CPU, _SECONDS + size // _BYTES_PER_SECOND)
    gc.disable()  # the collector would traverse a million live dicts again and again
    try:
        with open(path, "rb") as file:
            unpickler = PlainUnpickler(file)  # refers to all that it loaded: to free a million dicts takes long
            outcome = _tables(unpickler.load(), spans_key)
    except MemoryError:
        outcome = {"error": "refused as a snapshot: it asks for far more memory than its size accounts for"}
    except _Refused as error:
        outcome = {"error": str(error)}
    except Exception as error:  # a damaged or crafted pickle can raise anything
        text = f"not a pickle, or a damaged one ({_one_line(error)}); take the snapshot again"
        if str(error).startswith(("it would", "it refers")):
            text = f"refused as a snapshot: it holds more than plain data, {_one_line(error)}; nothing in it was run"
        outcome = {"error": text}
    try:
        pickle.dump(outcome, sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass
    os._exit(0)  # which frees nothing one by one


def _limit(resource_: int, amount: int) -> None:
    """Set a limit, or keep a lower one."""
    hard = resource.getrlimit(resource_)[1]
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(resource_, (amount, amount))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _tables(content: Any, spans_key: str) -> dict[str, Any]:
    """The columns of the events, segments, blocks, spans and annotations of a snapshot, and its distinct stacks."""
    if not isinstance(content, dict) or "segments" not in content or "device_traces" not in content:
        raise _Refused(
            "a pickle, but no snapshot of the CUDA allocator: needed segments and device_traces, as "
            "torch.cuda.memory._dump_snapshot and nvprof_kit.memory_snapshot write them"
        )
    segments = _rows(content["segments"], "segments", dict)
    pools = [_rows(segment.get("segment_pool_id", (0, 0)), "segments.segment_pool_id", int) for segment in segments]
    if any(abs(number) >= 1 << 64 for pool in pools for number in pool):
        raise _wrong("segments.segment_pool_id", "a pair of whole numbers")
    kinds = ["expandable" if segment.get("is_expandable") else segment.get("segment_type") for segment in segments]
    block_lists = _lists([segment.get("blocks") for segment in segments], "segments.blocks")
    blocks = [block for block_list in block_lists for block in block_list]
    requested = [{"requested_size": block.get("requested_size", block.get("size"))} for block in blocks]
    # PyTorch up to 2.1 writes no addresses of blocks
    addresses = {"address": "address"} if all("address" in block for block in blocks) else {}
    spans = [dict(zip(("time_us", "label"), pair, strict=True))
             for pair in _rows(content.get(spans_key) or [], spans_key, tuple, list)]  # fmt: skip
    annotations = _rows(content.get("external_annotations") or [], "external_annotations", dict)
    return {
        **_events_and_stacks(_lists(_rows(content["device_traces"], "device_traces", list), "device_traces")),
        "segments": {
            **{name: _integers(segments, key, "segments") for name, key in _SEGMENTS.items()},
            "kind": _texts(kinds, "segments.segment_type"),
            "pool": _texts([str(tuple(pool)) for pool in pools], "segments.segment_pool_id"),
        },
        "blocks": {
            "segment": _numbers(block_lists),
            **{name: _integers(blocks, key, "segments.blocks") for name, key in addresses.items()},
            "size_bytes": _integers(blocks, "size", "segments.blocks"),
            "requested_bytes": _integers(requested, "requested_size", "segments.blocks"),
            "state": _texts([block.get("state") for block in blocks], "segments.blocks.state"),
        },
        "spans": {
            "time_us": _integers(spans, "time_us", spans_key),
            "label": _texts([span["label"] for span in spans], spans_key),
        },
        "annotations": {
            **{key: _integers(annotations, key, "external_annotations") for key in ("time_us", "device")},
            "stage": _texts([row.get("stage") for row in annotations], "external_annotations.stage"),
            "name": _texts([row.get("name") for row in annotations], "external_annotations.name"),
        },
    }


def _events_and_stacks(histories: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The columns of the events of all devices, and the distinct stacks."""
    events = chain.from_iterable(histories)
    columns = {name: bytearray() for name in (*_EVENTS, "action", "label", "stack")}
    action_codes, label_codes = (defaultdict[Any, int](count().__next__) for _ in range(2))
    stacks = _Stacks()
    while rows := [*islice(events, _EVENTS_AT_ONCE)]:
        for name, (key, default) in _EVENTS.items():
            columns[name] += _integers(rows, key, "device_traces", default)
        actions = _values(rows, "action", "device_traces")
        columns["action"] += _codes(actions, action_codes, "device_traces.action")
        labels = _values(rows, "user_metadata", "device_traces", "")
        columns["label"] += _codes(labels, label_codes, "device_traces.user_metadata")
        numbers = [
            stacks.number(frames) if action == "alloc" and (frames := row.get("frames")) else -1
            for row, action in zip(rows, actions, strict=True)
        ]
        columns["stack"] += struct.pack(f"{len(rows)}q", *numbers)
    texts = [label or "" for label in label_codes]
    return {
        "events": {
            "device": _numbers(histories),
            **columns,
            "action": _text_column(columns["action"], action_codes, "device_traces.action"),
            "label": _text_column(columns["label"], texts, "device_traces.user_metadata"),
        },
        "stacks": stacks.distinct,
    }


def _rows(value: Any, name: str, *kinds: type) -> list[Any]:
    """Check for a list with items of these types."""
    if not isinstance(value, (list, tuple)) or set(map(type, value)) - {*kinds}:
        raise _wrong(name, f"a list of {kinds[0].__name__}s")
    return value if isinstance(value, list) else list(value)


def _lists(lists: list[Any], name: str) -> list[list[dict[str, Any]]]:
    """Check for lists of dicts, none of which is there twice: a small file could refer to one a million times."""
    filled = [id(rows) for rows in lists if rows]
    if len(set(filled)) < len(filled):
        raise _wrong(name, "a list of lists, each another")
    return [_rows(rows, name, dict) for rows in lists]


def _numbers(lists: list[list[Any]]) -> bytes:
    """For each item of some lists, the number of its list."""
    return b"".join(struct.pack("q", number) * len(rows) for number, rows in enumerate(lists))


def _wrong(name: str, need: str) -> _Refused:
    return _Refused(f"a snapshot in which {name} is not {need}; it is damaged: take the snapshot again")


def _values(rows: list[dict[str, Any]], key: str, table: str, default: Any = None) -> list[Any]:
    """The values of a key in all rows; the default stands for what out-of-memory events lack, and for times and labels,
    which PyTorch before 2.2 and 2.9 did not write.
    """
    try:
        return [*map(itemgetter(key), rows)]
    except KeyError:
        may_lack = key in ("time_us", "user_metadata") or all(key in row or row.get("action") == "oom" for row in rows)
    if default is None or not may_lack:
        raise _wrong(f"{table}.{key}", "in every row")
    return [row.get(key, default) for row in rows]


def _integers(rows: list[dict[str, Any]], key: str, table: str, default: int | None = None) -> bytes:
    """The values of a key in all rows, int64."""
    values = _values(rows, key, table, default)
    for type_code in "qQ":  # addresses can have the highest bit set
        with suppress(struct.error):
            return struct.pack(f"{len(rows)}{type_code}", *values)
    raise _wrong(f"{table}.{key}", "a whole number of 64 bits")


def _codes(texts: list[Any], code_of: defaultdict[Any, int], name: str) -> bytes:
    """The codes of texts; a new text gets the next one."""
    try:
        return struct.pack(f"{len(texts)}q", *map(code_of.__getitem__, texts))
    except TypeError:  # a list or a dict
        raise _wrong(name, "a text") from None


def _text_column(codes: bytes | bytearray, texts: Iterable[Any], name: str) -> tuple[bytes | bytearray, list[str]]:
    """Codes and the distinct texts that they number."""
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(name, "a text")
    return codes, [*map(_clean, texts)]


def _texts(texts: list[Any], name: str) -> tuple[bytes | bytearray, list[str]]:
    """Texts as codes into a list of their distinct values."""
    code_of = defaultdict[Any, int](count().__next__)
    return _text_column(_codes(texts, code_of, name), code_of, name)


def _clean(text: str) -> str:
    """A text without lone surrogates, which tables cannot store."""
    return text.encode("utf-8", "replace").decode()


class _Stacks:
    """Numbers the distinct stacks. PyTorch writes a list for every event, of shared frames; each frame is checked once.

    Attributes:
        distinct: The stacks by number.
    """

    def __init__(self) -> None:
        self.distinct: list[list[dict[str, Any]]] = []
        self._number_of: dict[tuple[int, ...], int] = {}
        self._latest: dict[int, tuple[list[Any], int]] = {}
        self._checked: dict[int, dict[str, Any]] = {}

    def number(self, frames: Any) -> int:
        """The number of a stack."""
        if not isinstance(frames, list) or len(frames) > _MAX_FRAMES:
            raise _wrong("device_traces.frames", f"a list of at most {_MAX_FRAMES} frames")
        latest, number = self._latest.get(id(frames[0]), (None, -1))  # most often the same again
        if latest is not frames and latest != frames:
            number = self._number_of.setdefault(tuple(map(id, frames)), len(self.distinct))
            if number == len(self.distinct):
                checked = self._checked
                self.distinct.append(
                    [checked.get(id(frame)) or checked.setdefault(id(frame), _frame(frame)) for frame in frames]
                )
            self._latest[id(frames[0])] = frames, number
        return number


def _frame(frame: Any) -> dict[str, Any]:
    """A checked copy of a frame of a stack."""
    filename, line, name = map(frame.get, ("filename", "line", "name")) if isinstance(frame, dict) else (None,) * 3
    if not isinstance(filename, str) or not isinstance(name, str) or type(line) is not int or abs(line) >= 1 << 62:
        raise _wrong("device_traces.frames", "of frames with filename, line and name")
    return {"filename": _clean(filename[:_MAX_LETTERS]), "line": line, "name": _clean(name[:_MAX_LETTERS])}
