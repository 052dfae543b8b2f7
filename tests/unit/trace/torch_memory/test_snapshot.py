"""Snapshots in, tables out; and nothing in a hostile pickle runs."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from support.captures.snapshot_file import BASE, SnapshotFile
from support.cli import execute, run

from nvprof_kit._trace.open import open_snapshot
from nvprof_kit.errors import CaptureError


class Attack:
    """Touches a file when it is loaded by a plain unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def test_tables(tmp_path):
    file = SnapshotFile()
    first = file.alloc(1024, "nvprof_kit:forward:layers.0;step=0", ["model.py:10:forward"])
    file.alloc(512)
    file.free(first)
    snapshot = open_snapshot(file.write(tmp_path / "run.pickle"))
    assert snapshot.events["action"].tolist() == ["alloc", "alloc", "free_requested", "free_completed"]
    assert snapshot.events["addr"].tolist() == [BASE, BASE + 1024, BASE, BASE]
    assert snapshot.events["stack"].tolist() == [0, -1, -1, -1]
    assert snapshot.stacks == [[{"filename": "model.py", "line": 10, "name": "forward"}]]
    assert snapshot.segments["total_bytes"].tolist() == [1536]
    assert snapshot.blocks["state"].tolist() == ["inactive", "active_allocated"]


def test_blocks_without_addresses_are_counted_up(tmp_path):
    """PyTorch up to 2.1 gives the address of a segment only."""
    file = SnapshotFile()
    for size in (1024, 512, 4096):
        file.alloc(size)
    plain = file.snapshot()
    second = {**plain["segments"][0], "address": BASE + (1 << 30)}
    plain["segments"].append({**second, "blocks": [dict(block) for block in second["blocks"]]})
    for segment in plain["segments"]:
        for block in segment["blocks"]:
            del block["address"]
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(plain))
    blocks = open_snapshot(tmp_path / "old.pickle").blocks
    assert (blocks["address"] - BASE).tolist()[:3] == [0, 1024, 1536]
    assert (blocks["address"] - BASE - (1 << 30)).tolist()[3:] == [0, 1024, 1536]
    assert blocks["segment"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path):
    path, trace = tmp_path / "run.pickle", tmp_path / "ran"
    snapshot = SnapshotFile().snapshot() | {"extra": Attack(trace)}
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(CaptureError) as refused:
        open_snapshot(path)
    assert "refused as a snapshot: it holds more than plain data, it would load posix.system" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # it does run by itself: the test tests something


EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "time_us": 2}
FRAME = {"filename": "a.py", "line": 1, "name": "f"}
BLOCK = {"address": 1, "size": 1, "requested_size": 1, "state": "inactive"}
SEGMENT = dict.fromkeys(("device", "address", "stream", "total_size", "allocated_size", "active_size"), 0)
MANY = 100_000


def plain(**parts: Any) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [[EVENT]], **parts})


def framed(frames: Any) -> bytes:
    return plain(device_traces=[[EVENT | {"frames": frames}]])


def segment(**parts: Any) -> dict[str, Any]:
    return {**SEGMENT, "segment_type": "small", "blocks": [], **parts}


REFUSED = {
    "a global by its old opcode": (b"cos\nsystem\n(S'touch ran'\ntR.", "it would load os.system"),
    "an instance": (b"(S'touch ran'\nios\nsystem\n.", "it would load os.system"),
    "an object": (b"(cos\nsystem\nS'touch ran'\no.", "it would load os.system"),
    "a builtin": (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "it would load builtins.eval"),
    "an extension": (b"\x80\x02\x82\x01.", "unregistered extension code 1"),
    "a persistent object": (b"Pthing\n.", "it refers to objects outside of it"),
    "state of a dict": (b"}}b.", "a damaged one"),
    "a size of a petabyte": (b"\x80\x04\x8e" + (1 << 50).to_bytes(8, "little") + b"x.", "far more memory|truncated"),
    "an array of a petabyte": (b"\x80\x05\x96" + (1 << 50).to_bytes(8, "little") + b"x.", "far more memory|truncated"),
    "a memo of 16 GiB": (b"\x80\x02}r" + (1 << 30).to_bytes(4, "little") + b".", "far more memory"),
    "nothing at all": (b"", "the file is empty"),
    "text": (b"hello", "a damaged one"),
    "cut off": (plain()[:-20], "a damaged one"),
    "a number": (pickle.dumps(3), "no snapshot of the CUDA allocator"),
    "another dict": (pickle.dumps({"a": 1}), "no snapshot of the CUDA allocator"),
    "events that are none": (plain(device_traces=[[1, 2]]), "device_traces is not a list of dicts"),
    "an address too large": (plain(device_traces=[[EVENT | {"addr": 1 << 99}]]), r"device_traces\.addr is not a whole"),
    "a size below 0": (plain(device_traces=[[EVENT | {"size": -1}]]), "events: size_bytes is -1 in 1 rows"),
    "a time after 2112": (plain(device_traces=[[EVENT | {"time_us": 1 << 53}]]), "time_us is 9007199254740992 in 1"),
    "histories that are a number": (plain(device_traces=3), "device_traces is not a list of lists"),
    **{
        f"spans that are none: {spans!r}": (plain(nvprof_kit_stretches=spans), "nvprof_kit_stretches|a damaged one")
        for spans in (5, [5], [("a", "b")], [(1 << 99, "b")], [(1,)], [(1, [])], {"a": 1})
    },
    "a segment without blocks": (plain(segments=[segment(blocks=None)]), r"segments\.blocks is not a list of dicts"),
    "one history for every device": (plain(device_traces=[[EVENT] * MANY] * MANY), "a list of lists, each another"),
    "one list of blocks for every segment": (
        plain(segments=[segment(blocks=[BLOCK] * MANY)] * MANY),
        "a list of lists, each another",
    ),
    "a stack of more frames than a stack has": (framed([FRAME] * MANY), "a list of at most 2000 frames"),
    "frames that are a number": (framed(5), "a list of at most 2000 frames"),
    "a frame that is a number": (framed([5]), "of frames with filename, line and name"),
    "a line that is a text": (framed([FRAME | {"line": "5"}]), "of frames with filename, line and name"),
    "annotations that are a number": (plain(external_annotations=5), "external_annotations is not a list of dicts"),
    "a huge pool": (plain(segments=[segment(segment_pool_id=(1 << 99, 0))]), "segment_pool_id is not a pair"),
}  # fmt: skip
"""Pickles and what is said of them. That each key of a snapshot is named where it is missing or of another type, the
fuzzer checks.
"""


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_whatever_is_wrong_is_one_line(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.pickle").write_bytes(content)
    assert len(content) < 3_000_000
    with pytest.raises(CaptureError, match=message) as refused:
        open_snapshot(Path("run.pickle"))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def doubled(levels: int) -> Any:
    """A tuple whose hash takes 2 ** levels steps."""
    pair: Any = (1,)
    for _ in range(levels):
        pair = (pair, pair)
    return pair


@pytest.mark.slow
def test_what_never_ends_is_ended(tmp_path):
    """A key whose hash takes 2 ** 60 steps hangs in the middle of loading, where nothing can be checked. A limit of the
    shell that is lower than the loader's holds.
    """
    # a dict with the key is written by hand, for making one takes as long
    key = pickle.dumps(doubled(60), protocol=2)[2:-1]
    (tmp_path / "run.pickle").write_bytes(b"\x80\x02}" + key + b"K\x01s.")
    command = f"ulimit -t 6; exec {sys.executable} -m nvprof_kit memory {tmp_path}/run.pickle"
    done = execute("bash", "-c", command)
    assert done.returncode == 2, done.stderr
    assert "more time or memory than its size accounts for" in done.stderr


def test_what_is_shared_by_many_is_read(tmp_path):
    """One stack, one frame and one event in a hundred thousand rows are what PyTorch writes, and no bomb."""
    event = EVENT | {"frames": [FRAME] * 2000}
    (tmp_path / "run.pickle").write_bytes(plain(device_traces=[[event] * MANY]))
    snapshot = open_snapshot(tmp_path / "run.pickle")
    assert snapshot.events["stack"].tolist() == [0] * MANY
    assert snapshot.stacks == [[FRAME] * 2000]


@pytest.mark.parametrize("form", ["table", "csv", "json", "md"])
def test_no_escape_reaches_the_terminal(form, tmp_path, capsys):
    evil = "\x1b[31mred\x9b2J\x07"
    file = SnapshotFile()
    for step in range(4):
        file.alloc(1000, f"nvprof_kit:forward:{evil};step={step}", [f"{evil}.py:1:{evil}"])
    made = file.snapshot()
    made["external_annotations"] = [{"time_us": 1, "device": 0, "stage": "START", "name": evil}]
    made["allocator_settings"] = {evil: evil}
    for one in made["segments"]:
        one["segment_type"] = evil
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(made))
    views = [[]] if form == "table" else [["--by", by] for by in ("layer", "stack", "segment", "leak")]
    for view in views:
        assert run("memory", str(tmp_path / "run.pickle"), "--format", form, *view) == 0
        text = "".join(capsys.readouterr())
        assert "red" in text or view == ["--by", "segment"]
        assert not {one for one in text if one != "\n" and (ord(one) < 32 or 0x7F <= ord(one) < 0xA0)}
