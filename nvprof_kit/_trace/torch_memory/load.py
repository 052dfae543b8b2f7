"""Load a snapshot in a separate process and print its columns as a pickle.

``python -I load.py FILE STRETCHES``, started by `nvprof_kit._trace.torch_memory.snapshot`.

An untrusted pickle can run arbitrary code when loaded, and a small one can use any amount of memory and time. It is
therefore loaded with an unpickler that rejects all classes and functions, in a process with limited memory that imports
only the standard library. The type of every value is checked before it is traversed; lists that share their parts many
times over are rejected.

The output on stdout is a pickle of numbers, text, lists and dicts.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import resource
import sys
from array import array
from collections.abc import Iterable
from operator import is_, itemgetter
from typing import Any

_ROOM = 2 << 30
_ROOM_PER_BYTE = 60
"""Memory limit for loading, fixed and per byte of the file: more than any real file needs."""
_SECONDS = 10
_BYTES_PER_SECOND = 2 << 20
"""CPU time limit, fixed and per number of bytes: a real file of 128 MB takes two seconds."""
_MOST_FRAMES = 2000
_LONGEST_NAME = 2000
_HALF_LETTER = re.compile("[\ud800-\udfff]")
_CLEANED: dict[str, str] = {}


class _Refused(Exception):
    pass


class _PlainUnpickler(pickle.Unpickler):
    """Loads plain data and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would load {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def main(path: str, stretches_name: str) -> None:
    """Print the columns of a snapshot, or a one-line error. The key `stretches_name` has what this package added."""
    size = os.path.getsize(path)
    _limit(resource.RLIMIT_AS, _ROOM + _ROOM_PER_BYTE * size)
    _limit(resource.RLIMIT_CPU, _SECONDS + size // _BYTES_PER_SECOND)
    gc.disable()  # the collector would traverse a million live dicts again and again
    try:
        with open(path, "rb") as file:
            outcome = _columns(_PlainUnpickler(file).load(), stretches_name)
    except pickle.UnpicklingError as error:
        more = "it holds more than plain data, " if "it would" in str(error) or "it refers" in str(error) else ""
        outcome = {"error": f"refused as a snapshot: {more}{_one_line(error)}; nothing in it was run"}
    except MemoryError:
        outcome = {"error": "refused as a snapshot: it asks for far more memory than its size accounts for"}
    except _Refused as error:
        outcome = {"error": str(error)}
    except Exception as error:  # a damaged or crafted pickle can raise anything
        outcome = {"error": f"not a pickle, or a damaged one ({_one_line(error)}); take the snapshot again"}
    try:
        pickle.dump(outcome, sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass
    os._exit(0)  # skip the deallocation of a million dicts


def _limit(of: int, to: int) -> None:
    """Set a limit, or keep a lower one."""
    hard = resource.getrlimit(of)[1]
    to = to if hard == resource.RLIM_INFINITY else min(to, hard)
    resource.setrlimit(of, (to, to))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _columns(plain: Any, stretches_name: str) -> dict[str, Any]:
    if not isinstance(plain, dict) or "segments" not in plain or "device_traces" not in plain:
        raise _Refused(
            "a pickle, but no snapshot of the CUDA allocator: needed segments and device_traces, as "
            "torch.cuda.memory._dump_snapshot and nvprof_kit.memory_snapshot write them"
        )
    settings = plain.get("allocator_settings")
    stacks = _Stacks()
    histories = _apart(_rows(plain["device_traces"], "device_traces", list), "device_traces")
    devices = [_history(history, stacks) for history in histories]
    segments = _segments(_rows(plain["segments"], "segments", dict))
    pairs = plain.get(stretches_name) or []
    pairs = _rows(pairs, "nvprof_kit's stretches", tuple if pairs and isinstance(pairs[0], tuple) else list)
    if not all(
        len(row) == 2 and isinstance(row[0], int) and abs(row[0]) < 2**62 and isinstance(row[1], str) for row in pairs
    ):
        raise _Refused(_not("nvprof_kit's stretches", "pairs of a time and a text"))
    rows = _rows(plain.get("external_annotations") or [], "external_annotations", dict)
    try:
        annotations = [(row["time_us"], row["device"], row["stage"] == "START", row["name"]) for row in rows]
    except KeyError as error:
        raise _Refused(_not(f"external_annotations.{error.args[0]}", "in every row")) from None
    if not all(
        isinstance(time, int) and abs(time) < 2**62 and isinstance(device, int) and isinstance(name, str)
        for time, device, _, name in annotations
    ):
        raise _Refused(_not("external_annotations", "rows of a time, a device and a name"))
    return {
        "devices": devices,
        "frames": stacks.frames,
        "stacks": (stacks.codes.tobytes(), stacks.lengths.tobytes()),
        "segments": segments,
        "stretches": [(time, _whole_letters(text)) for time, text in pairs],
        "annotations": [(time, device, is_start, _whole_letters(name)) for time, device, is_start, name in annotations],
        "settings": {
            key: value
            for key, value in (settings.items() if isinstance(settings, dict) else ())
            if isinstance(key, str) and (value is None or isinstance(value, (str, int, float)))
        },
    }


def _rows(value: Any, name: str, kind: type) -> list[Any]:
    """Check for a list with items of one type."""
    if not isinstance(value, (list, tuple)):
        raise _Refused(_not(name, "a list"))
    if set(map(type, value)) - {kind}:
        raise _Refused(_not(name, f"a list of {kind.__name__}s"))
    return list(value)


def _apart(lists: list[Any], name: str) -> list[Any]:
    """Check that no list appears twice: a small file could refer to the same one a million times."""
    full = [id(rows) for rows in lists if rows]
    if len(set(full)) < len(full):
        raise _Refused(_not(name, "a list of lists, each another"))
    return lists


def _not(name: str, need: str) -> str:
    return f"a snapshot in which {name} is not {need}; it is damaged: take the snapshot again"


def _integers(rows: list[dict[str, Any]], name: str, noun: str, missing: int | None = None) -> bytes:
    """The values of a key in all rows, int64; `missing` replaces values that out-of-memory events lack, and times,
    which PyTorch before 2.2 did not write.
    """
    try:
        return array("q", map(itemgetter(name), rows)).tobytes()
    except KeyError:
        lacking = [row for row in rows if name not in row]
        if missing is None or not (name == "time_us" or all(row.get("action") == "oom" for row in lacking)):
            raise _Refused(_not(f"{noun}.{name}", "in every row")) from None
        try:
            return array("q", (row.get(name, missing) for row in rows)).tobytes()
        except (TypeError, OverflowError):
            raise _Refused(_not(f"{noun}.{name}", "a whole number of 64 bits")) from None
    except (TypeError, OverflowError):
        try:
            return array("Q", map(itemgetter(name), rows)).tobytes()  # addresses can have the highest bit set
        except (TypeError, OverflowError):
            raise _Refused(_not(f"{noun}.{name}", "a whole number of 64 bits")) from None


def _texts(texts: Iterable[Any], name: str) -> tuple[bytes, list[str]]:
    """Texts as codes into their distinct values, in order of first appearance."""
    codes: dict[str, int] = {}
    try:
        numbers = array("q", [codes.setdefault(text, len(codes)) for text in texts])
    except TypeError:  # a list or a dict
        raise _Refused(_not(name, "a text")) from None
    if not all(isinstance(text, str) for text in codes):
        raise _Refused(_not(name, "a text"))
    return numbers.tobytes(), _distinct(codes)


def _distinct(texts: Iterable[str]) -> list[str]:
    """Replace lone surrogates, which tables cannot store, and keep the texts distinct."""
    distinct_texts: dict[str, None] = {}
    for text in texts:
        clean = _whole_letters(text)
        while clean in distinct_texts:
            clean += "'"
        distinct_texts[clean] = None
    return list(distinct_texts)


def _whole_letters(text: str) -> str:
    if not _HALF_LETTER.search(text):
        return text
    return _CLEANED.get(text) or _CLEANED.setdefault(text, _HALF_LETTER.sub("?", text))


def _history(history: list[Any], stacks: _Stacks) -> dict[str, Any]:
    rows = _rows(history, "device_traces", dict)
    try:
        actions = [row["action"] for row in rows]
    except KeyError:
        raise _Refused(_not("device_traces.action", "in every row")) from None
    return {
        **{name: _integers(rows, name, "device_traces", missing) for name, missing in _EVENT.items()},
        "action": _texts(actions, "device_traces.action"),
        "label": _texts((row.get("user_metadata") or "" for row in rows), "device_traces.user_metadata"),
        "stack": array("q", [
            stacks.number(frames) if action == "alloc" and (frames := row.get("frames")) else -1
            for row, action in zip(rows, actions, strict=True)
        ]).tobytes(),
    }  # fmt: skip


_EVENT = {"addr": 0, "size": None, "stream": 0, "time_us": 0}
"""The integers of an event, and what stands for those that it may lack."""


class _Stacks:
    """The distinct call stacks as frame numbers; a list or a frame with many references is checked once."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.codes, self.lengths = array("q"), array("q")
        self._lists: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._last: dict[tuple[int, int, int], tuple[list[Any], int]] = {}
        self._frames: dict[int, int] = {}

    def number(self, frames: Any) -> int:
        """Number of a call stack. PyTorch writes a list for every event, of shared frames."""
        if (code := self._lists.get(id(frames))) is not None:
            return code
        if not isinstance(frames, list) or len(frames) > _MOST_FRAMES:
            raise _Refused(_not("device_traces.frames", f"a list of at most {_MOST_FRAMES} frames"))
        # a training loop has a few hundred distinct lists, and the last one with the same ends is mostly the same
        ends = (id(frames[0]), id(frames[-1]), len(frames)) if frames else (0, 0, 0)
        last, code = self._last.get(ends, ([], None))
        if code is None or not all(map(is_, frames, last)):
            key = tuple(map(id, frames))
            if key not in self._stacks:
                self._stacks[key] = self._new(frames)
            code = self._stacks[key]
            self._last[ends] = frames, code
        self._lists[id(frames)] = code
        return code

    def _new(self, frames: list[Any]) -> int:
        code_of_frame = self._frames
        self.codes.extend(
            [
                code_of_frame[frame_id] if (frame_id := id(frame)) in code_of_frame else self._frame(frame)
                for frame in frames
            ]
        )
        self.lengths.append(len(frames))
        return len(self.lengths) - 1

    def _frame(self, frame: Any) -> int:
        if not isinstance(frame, dict):
            raise _Refused(_not("device_traces.frames", f"a list of at most {_MOST_FRAMES} frames"))
        fields = {key: frame.get(key, missing) for key, missing in (("filename", ""), ("line", 0), ("name", ""))}
        if not all(isinstance(fields[key], str) for key in ("filename", "name")) or not (
            isinstance(fields["line"], int) and abs(fields["line"]) < 2**62
        ):
            raise _Refused(_not("device_traces.frames", "of frames with filename, line and name"))
        code = self._frames[id(frame)] = len(self.frames)
        for key in ("filename", "name"):
            fields[key] = _whole_letters(fields[key][:_LONGEST_NAME])
        self.frames.append(fields)
        return code


def _segments(segments: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    _apart([segment.get("blocks") for segment in segments], "segments.blocks")
    for segment in segments:
        blocks += _rows(segment.get("blocks"), "segments.blocks", dict)
    pools = [row.get("segment_pool_id", (0, 0)) for row in segments]
    for pool in pools:
        if (
            not isinstance(pool, (list, tuple))
            or len(pool) != 2
            or not all(isinstance(number, int) and abs(number) < 2**64 for number in pool)
        ):
            raise _Refused(_not("segments.segment_pool_id", "a pair of whole numbers"))
    kinds = ["expandable" if row.get("is_expandable") else row.get("segment_type") for row in segments]
    addressed = all("address" in block for block in blocks)
    requested = [{"requested_size": block.get("requested_size", block.get("size"))} for block in blocks]
    integers = {name: _integers(segments, name, "segments") for name in ("device", "address", "stream")}
    sizes = {name: _integers(segments, name, "segments") for name in ("total_size", "allocated_size", "active_size")}
    return {
        **integers,
        **sizes,
        "kind": _texts(kinds, "segments.segment_type"),
        "pool": _texts([str(tuple(pool)) for pool in pools], "segments.segment_pool_id"),
        "count": array("q", [len(segment["blocks"]) for segment in segments]).tobytes(),
        "block_address": _integers(blocks, "address", "segments.blocks") if addressed else None,
        "block_size": _integers(blocks, "size", "segments.blocks"),
        "block_requested": _integers(requested, "requested_size", "segments.blocks"),
        "block_state": _texts([block.get("state") for block in blocks], "segments.blocks.state"),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
