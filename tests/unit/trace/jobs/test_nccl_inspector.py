"""The NCCL inspector's logs: real ones of two GPUs, hand-made ones, and what is no log."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nvprof_kit import open_job
from nvprof_kit._trace.jobs.flight_recorder import COLLECTIVES, read_flight_recorder
from nvprof_kit._trace.jobs.nccl_inspector import read_nccl_inspector
from nvprof_kit.errors import CaptureError

DATA = Path(__file__).parents[3] / "data" / "ranks"


def unpacked(name: str, folder: Path) -> pd.DataFrame:
    path = folder / name
    path.write_bytes(lzma.decompress((DATA / "inspector" / f"{name}.xz").read_bytes()))
    return read_nccl_inspector(path)


def line(kind: str = "coll", **said: Any) -> str:
    perf = {kind: "AllReduce", f"{kind}_sn": 4, f"{kind}_msg_size_bytes": 64, f"{kind}_exec_time_us": 12, **said}
    header = {"id": "0xab", "rank": 1, "n_ranks": 8, "nnodes": 1}
    return json.dumps({"header": header, "metadata": {"pid": 1}, f"{kind}_perf": perf}) + "\n"


def read(folder: Path, text: str) -> pd.DataFrame:
    path = folder / "log"
    path.write_text(text)
    return read_nccl_inspector(path)


def channel(start: int, stop: int) -> dict[str, int]:
    return {"channel_id": 0, "kernel_start_ts": start, "kernel_stop_ts": stop, "kernel_record_ts": stop}


def test_every_column(tmp_path: Path) -> None:
    channels = [channel(1020, 1040), channel(1010, 1030), channel(0, 0)]
    table = read(tmp_path, line(event_trace_ts={"coll_start_ts": 1000, "kernel_events": channels}))
    assert list(table.columns) == list(COLLECTIVES)
    (row,) = table.to_dict("records")
    assert row == {
        "rank": 1,
        "communicator": "0xab",
        "description": "",
        "ranks": 8,
        "sequence": 4,
        "kind": "all_reduce",
        "peer": -1,
        "bytes": 64,
        "enqueued_ns": 1_000_000,
        "start_ns": 1_010_000,  # of the first channel that began
        "end_ns": 1_040_000,  # of the last that ended
        "duration_ns": 12_000,
        "state": "completed",
    }


def test_without_verbose_it_tells_no_moments(tmp_path: Path) -> None:
    (row,) = read(tmp_path, line()).to_dict("records")
    assert (row["enqueued_ns"], row["start_ns"], row["end_ns"], row["duration_ns"]) == (-1, -1, -1, 12_000)


@pytest.mark.parametrize(("call", "kind", "size"), [("AllGather", "all_gather", 512), ("Broadcast", "broadcast", 64)])
def test_the_larger_buffer_counts(call: str, kind: str, size: int, tmp_path: Path) -> None:
    """NCCL counts an all-gather's message by what one of the 8 ranks gives."""
    (row,) = read(tmp_path, line(coll=call)).to_dict("records")
    assert (row["kind"], row["bytes"]) == (kind, size)


def test_sends_beside_collectives(tmp_path: Path) -> None:
    table = read(tmp_path, line() + line("p2p", p2p="Send", p2p_peer=3))
    assert table[["kind", "peer"]].values.tolist() == [["all_reduce", -1], ["send", 3]]


def test_a_line_still_being_written(tmp_path: Path) -> None:
    assert len(read(tmp_path, line() + line()[:50])) == 1


def test_two_gpus_of_which_one_is_late(tmp_path: Path) -> None:
    """DDP with more work in a layer of rank 1: its kernels begin last and end with those of rank 0."""
    first, second = (unpacked(f"ddp.rank{rank}.log", tmp_path).query("kind == 'all_reduce'") for rank in range(2))
    pairs = first.merge(second, on=["communicator", "kind", "sequence"], suffixes=("", "_late"))
    assert len(pairs) > 100 and (pairs["bytes"] == pairs["bytes_late"]).all()
    apart = (pairs["end_ns"] - pairs["end_ns_late"]).abs()
    assert apart.median() < 100_000  # one host, one clock
    assert pairs["duration_ns"].sum() > 3 * pairs["duration_ns_late"].sum()


def test_both_sources_say_the_same_of_one_run(tmp_path: Path) -> None:
    recorded = read_flight_recorder(DATA / "flight" / "ddp-layer.rank0.flight").collectives
    recorded = recorded[recorded["kind"].isin(["all_reduce", "all_reduce_barrier"])].reset_index(drop=True)
    inspected = unpacked("ddp.rank0.log", tmp_path).query("kind == 'all_reduce'").reset_index(drop=True)
    rows = min(len(recorded), len(inspected))
    assert rows > 100
    assert recorded["bytes"][:rows].tolist() == inspected["bytes"][:rows].tolist()
    ratio = recorded["duration_ns"][:rows] / inspected["duration_ns"][:rows]
    assert 1 <= ratio.median() < 1.05  # the Flight Recorder's events lie around the kernel


def test_tensor_parallel_of_a_newer_plug_in(tmp_path: Path) -> None:
    table = unpacked("tensor.rank0.log", tmp_path)
    assert set(table["kind"]) == {"send", "all_reduce"}
    assert table.loc[table["kind"] == "send", "peer"].unique().tolist() == [1]
    assert (table.loc[table["kind"] == "send", "start_ns"] == -1).all()  # no kernel was seen, only the call


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty file"),
        (line()[:40], "no whole line"),
        ("no json\n", "not a log of the NCCL Inspector"),
        (line() + '{"a": 1}\n', "line 2 is not from"),
        (line(coll_sn="four"), "not a log of the NCCL Inspector"),
    ],
)
def test_what_is_no_log(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        read(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no such file"):
        read_nccl_inspector(tmp_path / "none")


@pytest.mark.parametrize(
    ("part", "key", "value", "complaint"),
    [
        ("coll_perf", "coll_exec_time_us", -5, "coll_perf.coll_exec_time_us is -5"),
        ("coll_perf", "coll_exec_time_us", 2**62, "duration_ns of collectives is"),
        ("coll_perf", "coll_msg_size_bytes", 2**62, "the size of collectives is"),
        ("coll_perf", "coll_sn", -3, "coll_perf.coll_sn is -3"),
        ("header", "n_ranks", -4, "header.n_ranks is -4"),
        ("header", "rank", 77, "header.rank is no rank of header.n_ranks"),
    ],
)
def test_what_no_inspector_writes_is_refused_by_name(
    tmp_path: Path, part: str, key: str, value: int, complaint: str
) -> None:
    packed = Path(__file__).parents[3] / "data" / "ranks" / "inspector" / "ddp.rank0.log.xz"
    line = json.loads(lzma.decompress(packed.read_bytes()).splitlines()[0])
    line[part][key] = value
    (path := tmp_path / "a.log").write_text(json.dumps(line) + "\n")
    with pytest.raises(CaptureError, match=complaint):
        read_nccl_inspector(path)


@pytest.mark.parametrize(
    ("part", "key"),
    [("header", "rank"), ("header", "n_ranks"), ("coll_perf", "coll_sn"), ("coll_perf", "coll_exec_time_us")],
)
@pytest.mark.parametrize("value", [None, -1])
def test_a_field_that_only_some_lines_have_is_named(tmp_path: Path, part: str, key: str, value: int | None) -> None:
    """Where no line has it, it is unknown; -1 stands for that in the table, and is no value of a log."""
    said = json.loads(line())
    said[part][key] = value
    with pytest.raises(CaptureError, match=rf"{part}\.{key} is (missing in 1 of 3 lines|-1 in 1 lines)"):
        read(tmp_path, line() + json.dumps(said) + "\n" + line())


@pytest.mark.parametrize("field", ["coll_sn", "coll_msg_size_bytes", "coll_exec_time_us"])
def test_a_field_that_the_inspector_always_writes_may_not_be_missing_in_all_lines(tmp_path: Path, field: str) -> None:
    said = json.loads(line())
    del said["coll_perf"][field]
    with pytest.raises(CaptureError, match=rf"coll_perf\.{field} is missing in 2 of 2 lines"):
        read(tmp_path, 2 * (json.dumps(said) + "\n"))


@pytest.mark.parametrize("field", ["p2p_sn", "p2p_msg_size_bytes", "p2p_exec_time_us", "p2p_peer"])
def test_so_may_not_those_of_sends_and_receives(tmp_path: Path, field: str) -> None:
    log = lzma.decompress((DATA / "inspector" / "tensor.rank0.log.xz").read_bytes())
    rows = [json.loads(row) for row in log.splitlines()]
    sends = [row for row in rows if "p2p_perf" in row]
    for row in sends:
        row["p2p_perf"][field] = None
    with pytest.raises(CaptureError, match=rf"p2p_perf\.{field} is missing in {len(sends)} of {len(sends)} lines"):
        read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("key", ["header", "coll_perf"])
def test_a_log_without_one_of_its_keys_is_refused_and_not_left_out_of_its_folder(tmp_path: Path, key: str) -> None:
    whole = json.loads(lzma.decompress((DATA / "inspector" / "ddp.rank0.log.xz").read_bytes()).splitlines()[0])
    (tmp_path / "job.rank0.log").write_text(json.dumps(whole) + "\n")
    whole[f"{key}_of_2031"] = whole.pop(key)
    (tmp_path / "job.rank1.log").write_text(json.dumps(whole) + "\n")
    with pytest.raises(CaptureError, match="line 1 is not from the NCCL Inspector"):
        open_job([tmp_path], workers=1).answer()
