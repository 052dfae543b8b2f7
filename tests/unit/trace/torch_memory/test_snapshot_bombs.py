"""Small snapshots that ask for much: what many rows share is looked at once, or refused, and none takes long."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.captures.snapshot_file import SnapshotFile

from nvprof_kit._cli import main
from nvprof_kit._trace.open import open_snapshot
from nvprof_kit.errors import CaptureError

MANY = 100_000
FRAME = {"filename": "a.py", "line": 1, "name": "f"}
EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "time_us": 2}
BLOCK = {"address": 1, "size": 1, "requested_size": 1, "state": "inactive"}


def plain(**parts: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": [[EVENT]], **parts}


def segment(**parts: Any) -> dict[str, Any]:
    made = dict.fromkeys(("device", "address", "stream", "total_size", "allocated_size", "active_size"), 0)
    return {**made, "segment_type": "small", "blocks": [], **parts}


def doubled(levels: int) -> Any:
    """A tuple whose hash takes 2 ** levels steps."""
    made: Any = (1,)
    for _ in range(levels):
        made = (made, made)
    return made


REFUSED: dict[str, Callable[[], Any]] = {
    "one history for every device": lambda: plain(device_traces=[[EVENT] * MANY] * MANY),
    "one list of blocks for every segment": lambda: plain(segments=[segment(blocks=[BLOCK] * MANY)] * MANY),
    "a stack of more frames than a stack has": lambda: plain(device_traces=[[EVENT | {"frames": [FRAME] * MANY}]]),
    "frames that are a number": lambda: plain(device_traces=[[EVENT | {"frames": 5}]]),
    "a frame that is a number": lambda: plain(device_traces=[[EVENT | {"frames": [5]}]]),
    "a line that is a text": lambda: plain(device_traces=[[EVENT | {"frames": [FRAME | {"line": "5"}]}]]),
    "annotations that are a number": lambda: plain(external_annotations=5),
    "an annotation without a name": lambda: plain(external_annotations=[{"time_us": 1, "device": 0, "stage": "END"}]),
    "an annotation at no time": lambda: plain(
        external_annotations=[{"time_us": "1", "device": 0, "stage": "END", "name": "a"}]
    ),
    "a pool of huge numbers": lambda: plain(segments=[segment(segment_pool_id=(1 << 99, 0))]),
}  # fmt: skip


@pytest.mark.parametrize("made", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line(made: Callable[[], Any], tmp_path: Path) -> None:
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(made()))
    assert (tmp_path / "run.pickle").stat().st_size < 3_000_000
    with pytest.raises(CaptureError) as refused:
        open_snapshot(tmp_path / "run.pickle")
    assert "\n" not in str(refused.value)


def test_what_never_ends_is_ended(tmp_path: Path) -> None:
    """A key whose hash takes 2 ** 60 steps hangs in the middle of loading, where nothing can be checked. A limit of the
    shell that is lower than the loader's holds.
    """
    # a dict with the key is written by hand, for making one takes as long
    key = pickle.dumps(doubled(60), protocol=2)[2:-1]
    (tmp_path / "run.pickle").write_bytes(b"\x80\x02}" + key + b"K\x01s.")
    command = f"ulimit -t 6; exec {sys.executable} -m nvprof_kit memory {tmp_path}/run.pickle"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "more time or memory than its size accounts for" in done.stderr


def test_what_is_shared_by_many_is_read(tmp_path: Path) -> None:
    """One stack, one frame and one event in a hundred thousand rows are what PyTorch writes, and no bomb."""
    event = EVENT | {"frames": [FRAME] * 2000}
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(plain(device_traces=[[event] * MANY])))
    snapshot = open_snapshot(tmp_path / "run.pickle")
    assert len(snapshot.stacks) == len(snapshot.events) == MANY
    assert snapshot.stacks[MANY - 1] == [FRAME] * 2000
    with pytest.raises(KeyError):
        snapshot.stacks[MANY]


@pytest.mark.parametrize("form", ["table", "csv", "json", "md"])
def test_no_escape_reaches_the_terminal(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["memory", str(tmp_path / "run.pickle"), "--format", form, *view])
        text = "".join(capsys.readouterr())
        assert "red" in text or view == ["--by", "segment"]
        assert not {one for one in text if one != "\n" and (ord(one) < 32 or 0x7F <= ord(one) < 0xA0)}
