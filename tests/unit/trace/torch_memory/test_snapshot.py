"""Snapshots in, tables out; and nothing in a hostile pickle runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from support.captures.snapshot_file import BASE, SnapshotFile

from nvprof_kit import open_snapshot
from nvprof_kit.errors import CaptureError


class Attack:
    """Touches a file when it is loaded by a plain unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def test_tables(tmp_path: Path) -> None:
    file = SnapshotFile()
    first = file.alloc(1024, "nvprof_kit:forward:layers.0;step=0", ["model.py:10:forward"])
    file.alloc(512)
    file.free(first)
    snapshot = open_snapshot(file.write(tmp_path / "run.pickle")).snapshot
    assert snapshot.events["action"].tolist() == ["alloc", "alloc", "free_requested", "free_completed"]
    assert snapshot.events["addr"].tolist() == [BASE, BASE + 1024, BASE, BASE]
    assert snapshot.stacks == {0: [{"filename": "model.py", "line": 10, "name": "forward"}]}
    assert snapshot.segments["total_bytes"].tolist() == [1536]
    assert snapshot.blocks["state"].tolist() == ["inactive", "active_allocated"]


def test_a_stack_that_recurs(tmp_path: Path) -> None:
    """PyTorch writes a list for every event, and a loop comes by the same lines again and again."""
    file = SnapshotFile()
    for _ in range(50):
        file.alloc(1000, stack=["a.py:1:f", "b.py:2:g"])
        file.alloc(1000, stack=["a.py:1:f"])
    stacks = open_snapshot(file.write(tmp_path / "run.pickle")).snapshot.stacks
    assert len(stacks) == 100
    assert [[frame["name"] for frame in stacks[row]] for row in (98, 99)] == [["f", "g"], ["f"]]


def test_blocks_without_addresses_are_counted_up(tmp_path: Path) -> None:
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
    blocks = open_snapshot(tmp_path / "old.pickle").snapshot.blocks
    assert (blocks["address"] - BASE).tolist()[:3] == [0, 1024, 1536]
    assert (blocks["address"] - BASE - (1 << 30)).tolist()[3:] == [0, 1024, 1536]
    assert blocks["segment"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "run.pickle", tmp_path / "ran"
    snapshot = SnapshotFile().snapshot() | {"extra": Attack(trace)}
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(CaptureError) as refused:
        open_snapshot(path).memory()
    assert "refused as a snapshot: it holds more than plain data, it would load posix.system" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # it does run by itself: the test tests something


_EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "time_us": 2}

HOSTILE = {
    "a global by its old opcode": b"cos\nsystem\n(S'touch ran'\ntR.",
    "an instance": b"(S'touch ran'\nios\nsystem\n.",
    "an object": b"(cos\nsystem\nS'touch ran'\no.",
    "a builtin": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent object": b"Pthing\n.",
    "state of a dict": b"}}b.",
    "a size of a petabyte": b"\x80\x04\x8e" + (1 << 50).to_bytes(8, "little") + b"x.",
    "an array of a petabyte": b"\x80\x05\x96" + (1 << 50).to_bytes(8, "little") + b"x.",
    "a memo of 16 GiB": b"\x80\x02}r" + (1 << 30).to_bytes(4, "little") + b".",
    "nothing at all": b"",
    "text": b"hello",
    "cut off": pickle.dumps(SnapshotFile().snapshot())[:-20],
    "a number": pickle.dumps(3),
    "another dict": pickle.dumps({"a": 1}),
    "events that are none": pickle.dumps({"segments": [], "device_traces": [[1, 2]]}),
    "addresses that are none": pickle.dumps(
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": "x", "size": 1, "stream": 0}]]}
    ),
    "numbers too large": pickle.dumps(
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 99, "size": 1, "stream": 0}]]}
    ),
    "a device trace that is no list": pickle.dumps({"segments": [], "device_traces": 3}),
    **{
        f"stretches that are none: {stretches!r}": pickle.dumps(
            SnapshotFile().snapshot() | {"device_traces": [[_EVENT]], "nvprof_kit_stretches": stretches}
        )
        for stretches in (5, [5], [("a", "b")], [(1 << 99, "b")], [(1,)], [(1, [])], {"a": 1})
    },
    "a segment without blocks": pickle.dumps({"segments": [{}], "device_traces": []}),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_whatever_is_wrong_is_one_line(payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.pickle").write_bytes(payload)
    with pytest.raises(CaptureError) as refused:
        open_snapshot("run.pickle").memory()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(Attack(tmp_path / "ran")))
    done = subprocess.run(
        [sys.executable, "-m", "nvprof_kit", "memory", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no such file"):
        open_snapshot(tmp_path / "none.pickle").memory()
    with pytest.raises(CaptureError, match="directory"):
        open_snapshot(tmp_path).memory()
