"""Load a pickle of plain data in a separate process and print it as a pickle, a snapshot as its columns.

``python -I load.py FILE WHAT [STRETCHES]``, started by `nvprof_kit._trace.files.plain_pickle`.

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
_BATCH = 2048
"""So many rows are taken at a time: all their keys are read while the rows are in the processor's cache."""
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


def main(path: str, what: str, stretches: str = "") -> None:
    """Print the content of a file, or a one-line error: with the argument `stretches`, the columns of a snapshot;
    without it, everything unchanged.
    """
    size = os.path.getsize(path)
    _limit(resource.RLIMIT_AS, _ROOM + _ROOM_PER_BYTE * size)
    _limit(resource.RLIMIT_CPU, _SECONDS + size // _BYTES_PER_SECOND)
    gc.disable()  # the collector would traverse a million live dicts again and again
    outcome = _outcome(path, what, stretches)
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


def _outcome(path: str, what: str, stretches: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            plain = _PlainUnpickler(file).load()
        return _columns(plain, stretches) if stretches else {"plain": plain}
    except pickle.UnpicklingError as error:
        more = "it holds more than plain data, " if "it would" in str(error) or "it refers" in str(error) else ""
        return {"error": f"refused as a {what}: {more}{_one_line(error)}; nothing in it was run"}
    except MemoryError:
        return {"error": f"refused as a {what}: it asks for far more memory than its size accounts for"}
    except _Refused as error:
        return {"error": str(error)}
    except Exception as error:  # a damaged or crafted pickle can raise anything
        return {"error": f"not a pickle, or a damaged one ({_one_line(error)}); take the {what} again"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _columns(plain: Any, stretches: str) -> dict[str, Any]:
    if not isinstance(plain, dict) or "segments" not in plain or "device_traces" not in plain:
        raise _Refused(
            "a pickle, but no snapshot of the CUDA allocator: needed segments and device_traces, as "
            "torch.cuda.memory._dump_snapshot and nvprof_kit.memory_snapshot write them"
        )
    settings = plain.get("allocator_settings")
    stacks = _Stacks()
    histories = _apart(_rows(plain["device_traces"], "device_traces", list), "device_traces")
    return {
        "devices": [_history(one, stacks) for one in histories],
        "frames": stacks.frames,
        "stacks": (stacks.codes.tobytes(), stacks.lengths.tobytes()),
        "segments": _segments(_rows(plain["segments"], "segments", dict)),
        "stretches": _stretches(plain.get(stretches) or []),
        "annotations": _annotations(plain.get("external_annotations") or []),
        "settings": {key: value for key, value in settings.items() if isinstance(key, str) and _scalar(value)}
        if isinstance(settings, dict)
        else {},
    }


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _rows(found: Any, name: str, kind: type) -> list[Any]:
    """Check for a list with items of one type."""
    if not isinstance(found, (list, tuple)):
        raise _Refused(_not(name, "a list"))
    if set(map(type, found)) - {kind}:
        raise _Refused(_not(name, f"a list of {kind.__name__}s"))
    return list(found)


def _apart(lists: list[Any], name: str) -> list[Any]:
    """Check that no list appears twice: a small file could refer to the same one a million times."""
    full = [id(one) for one in lists if one]
    if len(set(full)) < len(full):
        raise _Refused(_not(name, "a list of lists, each another"))
    return lists


def _not(name: str, needed: str) -> str:
    return f"a snapshot in which {name} is not {needed}; it is damaged: take the snapshot again"


def _integers(rows: list[dict[str, Any]], name: str, what: str, missing: int | None = None) -> bytes:
    """The values of a key in all rows, int64; `missing` replaces values that out-of-memory events lack, and times,
    which PyTorch before 2.2 did not write.
    """
    try:
        return array("q", map(itemgetter(name), rows)).tobytes()
    except KeyError:
        lacking = [row for row in rows if name not in row]
        if missing is None or not (name == "time_us" or all(row.get("action") == "oom" for row in lacking)):
            raise _Refused(_not(f"{what}.{name}", "in every row")) from None
        try:
            return array("q", (row.get(name, missing) for row in rows)).tobytes()
        except (TypeError, OverflowError):
            raise _Refused(_not(f"{what}.{name}", "a whole number of 64 bits")) from None
    except (TypeError, OverflowError):
        return _wide(rows, name, what)


def _wide(rows: list[dict[str, Any]], name: str, what: str) -> bytes:
    """The same for addresses, which can have the highest bit set."""
    try:
        return array("Q", map(itemgetter(name), rows)).tobytes()
    except (TypeError, OverflowError):
        raise _Refused(_not(f"{what}.{name}", "a whole number of 64 bits")) from None


class _Codes(dict[str, int]):
    """Numbers of texts, in order of first appearance; a text gets its number when it is first asked for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, text: object) -> int:
        if not isinstance(text, str):
            raise _Refused(_not(self._name, "a text"))
        self[text] = len(self)
        return len(self) - 1

    def of(self, texts: Iterable[Any]) -> bytes:
        """The numbers of texts, int64."""
        try:
            return array("q", map(self.__getitem__, texts)).tobytes()
        except TypeError:  # a list or a dict
            raise _Refused(_not(self._name, "a text")) from None


def _texts(texts: Iterable[Any], name: str) -> tuple[bytes, list[str]]:
    """Texts as codes into their distinct values, in order of first appearance."""
    codes = _Codes(name)
    return codes.of(texts), _distinct(codes)


def _distinct(texts: Iterable[str]) -> list[str]:
    """Replace lone surrogates, which tables cannot store, and keep the texts distinct."""
    found: dict[str, None] = {}
    for text in texts:
        clean = _whole_letters(text)
        while clean in found:
            clean += "'"
        found[clean] = None
    return list(found)


def _whole_letters(text: str) -> str:
    if not _HALF_LETTER.search(text):
        return text
    return _CLEANED.get(text) or _CLEANED.setdefault(text, _HALF_LETTER.sub("?", text))


def _history(history: list[Any], stacks: _Stacks) -> dict[str, Any]:
    rows = _rows(history, "device_traces", dict)
    actions, labels = _Codes("device_traces.action"), _Codes("device_traces.user_metadata")
    batches = [_batch(rows[at : at + _BATCH], actions, labels, stacks) for at in range(0, len(rows), _BATCH)]
    columns = {name: b"".join([batch[name] for batch in batches]) for name in (*_EVENT, "action", "label", "stack")}
    return columns | {
        "action": (columns["action"], _distinct(actions)),
        "label": (columns["label"], _distinct(labels)),
    }


_EVENT = {"addr": 0, "size": None, "stream": 0, "time_us": 0}
"""The integers of an event, and what stands for those that it may lack."""


def _batch(rows: list[dict[str, Any]], actions: _Codes, labels: _Codes, stacks: _Stacks) -> dict[str, bytes]:
    try:
        done = list(map(itemgetter("action"), rows))
    except KeyError:
        raise _Refused(_not("device_traces.action", "in every row")) from None
    return {
        **{name: _integers(rows, name, "device_traces", missing) for name, missing in _EVENT.items()},
        "action": actions.of(done),
        "label": labels.of([row.get("user_metadata") or "" for row in rows]),
        "stack": array("q", [
            stacks.number(found) if action == "alloc" and (found := row.get("frames")) else -1
            for row, action in zip(rows, done, strict=True)
        ]).tobytes(),
    }  # fmt: skip


class _Stacks:
    """The distinct call stacks as frame numbers; a list or a frame with many references is checked once."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.codes, self.lengths = array("q"), array("q")
        self._lists: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._last: dict[tuple[int, int, int], tuple[list[Any], int]] = {}
        self._frames: dict[int, int] = {}

    def number(self, found: Any) -> int:
        """Number of a call stack."""
        place = self._lists.get(id(found))
        if place is None:
            if not isinstance(found, list) or len(found) > _MOST_FRAMES:
                raise _Refused(_not("device_traces.frames", f"a list of at most {_MOST_FRAMES} frames"))
            place = self._lists[id(found)] = self._known(found) if found else self._new(found)
        return place

    def _known(self, found: list[Any]) -> int:
        """Number of a list of frames. PyTorch writes a list for every event, of shared frames; a training loop has
        only a few hundred distinct ones, and the last one with the same ends is mostly the same.
        """
        ends = id(found[0]), id(found[-1]), len(found)
        last = self._last.get(ends)
        if last is not None and all(map(is_, found, last[0])):
            return last[1]
        key = tuple(map(id, found))
        place = self._stacks.get(key)
        if place is None:
            place = self._stacks[key] = self._new(found)
        self._last[ends] = found, place
        return place

    def _new(self, found: list[Any]) -> int:
        known = self._frames
        self.codes.extend([known[one] if (one := id(frame)) in known else self._frame(frame) for frame in found])
        self.lengths.append(len(found))
        return len(self.lengths) - 1

    def _frame(self, frame: Any) -> int:
        if not isinstance(frame, dict):
            raise _Refused(_not("device_traces.frames", f"a list of at most {_MOST_FRAMES} frames"))
        kept = {key: frame.get(key, missing) for key, missing in (("filename", ""), ("line", 0), ("name", ""))}
        if not all(isinstance(kept[key], str) for key in ("filename", "name")) or not (
            isinstance(kept["line"], int) and abs(kept["line"]) < 2**62
        ):
            raise _Refused(_not("device_traces.frames", "of frames with filename, line and name"))
        place = self._frames[id(frame)] = len(self.frames)
        for key in ("filename", "name"):
            kept[key] = _whole_letters(kept[key][:_LONGEST_NAME])
        self.frames.append(kept)
        return place


def _segments(segments: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    _apart([segment.get("blocks") for segment in segments], "segments.blocks")
    for segment in segments:
        blocks += _rows(segment.get("blocks"), "segments.blocks", dict)
    kinds = ["expandable" if one.get("is_expandable") else one.get("segment_type") for one in segments]
    addressed = all("address" in block for block in blocks)
    requested = [{"requested_size": block.get("requested_size", block.get("size"))} for block in blocks]
    integers = {name: _integers(segments, name, "segments") for name in ("device", "address", "stream")}
    sizes = {name: _integers(segments, name, "segments") for name in ("total_size", "allocated_size", "active_size")}
    return {
        **integers,
        **sizes,
        "kind": _texts(kinds, "segments.segment_type"),
        "pool": _texts([_pool(one.get("segment_pool_id", (0, 0))) for one in segments], "segments.segment_pool_id"),
        "count": array("q", [len(segment["blocks"]) for segment in segments]).tobytes(),
        "block_address": _integers(blocks, "address", "segments.blocks") if addressed else None,
        "block_size": _integers(blocks, "size", "segments.blocks"),
        "block_requested": _integers(requested, "requested_size", "segments.blocks"),
        "block_state": _texts([block.get("state") for block in blocks], "segments.blocks.state"),
    }


def _pool(found: Any) -> str:
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 2
        or not all(isinstance(one, int) and abs(one) < 2**64 for one in found)
    ):
        raise _Refused(_not("segments.segment_pool_id", "a pair of whole numbers"))
    return str(tuple(found))


def _stretches(found: Any) -> list[tuple[int, str]]:
    rows = _rows(found, "nvprof_kit's stretches", tuple if found and isinstance(found[0], tuple) else list)
    if not all(
        len(row) == 2 and isinstance(row[0], int) and abs(row[0]) < 2**62 and isinstance(row[1], str) for row in rows
    ):
        raise _Refused(_not("nvprof_kit's stretches", "pairs of a time and a text"))
    return [(row[0], _whole_letters(row[1])) for row in rows]


def _annotations(found: Any) -> list[tuple[int, int, bool, str]]:
    """User annotations: time in µs, device, whether it is a begin, name."""
    rows = _rows(found, "external_annotations", dict)
    try:
        made = [(row["time_us"], row["device"], row["stage"] == "START", row["name"]) for row in rows]
    except KeyError as error:
        raise _Refused(_not(f"external_annotations.{error.args[0]}", "in every row")) from None
    if not all(
        isinstance(time, int) and abs(time) < 2**62 and isinstance(device, int) and isinstance(name, str)
        for time, device, _, name in made
    ):
        raise _Refused(_not("external_annotations", "rows of a time, a device and a name"))
    return [(time, device, begins, _whole_letters(name)) for time, device, begins, name in made]


if __name__ == "__main__":
    main(*sys.argv[1:])
