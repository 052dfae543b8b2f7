"""Flight Recorder dumps: real ones of two GPUs and of gloo, hand-made ones of older formats, and what is no dump."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from nvprof_kit._api.job import open_job
from nvprof_kit._trace.jobs.flight_recorder import COLLECTIVES, read_flight_recorder
from nvprof_kit.errors import CaptureError

DUMPS = Path(__file__).parents[3] / "data" / "ranks" / "flight"


def entry(**said: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": 7,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": ("1", "dp"),
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 3]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 3]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_created_ns": 100,
        "time_discovered_started_ns": 200,
        "time_discovered_completed_ns": 300,
        "duration_ms": 0.000075,
        **said,
    }


def dumped(folder: Path, *entries: dict[str, Any], name: str = "nccl_trace_rank_3", **said: Any) -> Path:
    groups = {"1": {"name": "1", "desc": "dp", "ranks": "[1, 3]"}}
    path = folder / name
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": groups, "entries": list(entries), **said}, 2))
    return path


def test_every_column(tmp_path: Path) -> None:
    dump = read_flight_recorder(dumped(tmp_path, entry()))
    assert (dump.version, dump.rank) == ("2.10", 3)
    assert list(dump.collectives.columns) == list(COLLECTIVES)
    (row,) = dump.collectives.to_dict("records")
    assert row == {
        "rank": 3,
        "communicator": "1",
        "description": "dp",
        "ranks": 2,
        "sequence": 7,
        "kind": "all_reduce",
        "peer": -1,
        "bytes": 24,  # 4 x 3 elements of 2 bytes
        "enqueued_ns": 100,
        "start_ns": 200,
        "end_ns": 300,
        "duration_ns": 75,
        "state": "completed",
    }


@pytest.mark.parametrize(
    ("name", "kind", "peer"),
    [
        ("nccl:_all_gather_base", "all_gather", -1),
        ("nccl:_reduce_scatter_base", "reduce_scatter", -1),
        ("nccl:send 0->1", "send", 1),
        ("nccl:recv 0<-12", "recv", 12),
        ("gloo:barrier", "barrier", -1),
        ("something new: of 2 words", "something new: of 2 words", -1),
    ],
)
def test_kinds(name: str, kind: str, peer: int, tmp_path: Path) -> None:
    (row,) = read_flight_recorder(dumped(tmp_path, entry(profiling_name=name))).collectives.to_dict("records")
    assert (row["kind"], row["peer"]) == (kind, peer)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (["1"], "pg_config is "),
        ({"1": "dp"}, "pg_config: 1 is 'dp'"),
        ({"1": {"name": "1", "ranks": [1, 3]}}, "ranks of pg_config is "),
        ({"1": {"name": "1", "ranks": "[1, 3"}}, "with invalid entries"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=re.escape(said)) as refused:
        read_flight_recorder(dumped(tmp_path, entry(), pg_config=groups))
    assert "\n" not in str(refused.value)


def test_the_larger_buffer_counts(tmp_path: Path) -> None:
    gather = entry(output_sizes=[[2, 4, 3]])
    (row,) = read_flight_recorder(dumped(tmp_path, gather)).collectives.to_dict("records")
    assert row["bytes"] == 48  # what is gathered of both


def test_parts_of_what_was_coalesced_have_its_times(tmp_path: Path) -> None:
    """Only the whole is timed; here a send and a receive in one launch."""
    part = {"is_p2p": True, "collective_seq_id": 0, "p2p_seq_id": 5, "state": "scheduled", "duration_ms": None}
    whole = entry(profiling_name="nccl:coalesced", collective_seq_id=0, p2p_seq_id=5, input_sizes=[], input_dtypes=[])
    dump = read_flight_recorder(
        dumped(
            tmp_path,
            entry(profiling_name="nccl:send 0->1", **part),
            entry(profiling_name="nccl:recv 0<-1", **part),
            whole,
        )
    )
    said = dump.collectives[["kind", "sequence", "duration_ns", "end_ns", "state"]].values.tolist()
    assert said == [["send", 5, 75, 300, "completed"], ["recv", 5, 75, 300, "completed"]]


def test_one_that_hangs(tmp_path: Path) -> None:
    stuck = entry(state="started", time_discovered_completed_ns=None, duration_ms=None)
    (row,) = read_flight_recorder(dumped(tmp_path, stuck)).collectives.to_dict("records")
    assert (row["state"], row["start_ns"], row["end_ns"], row["duration_ns"]) == ("started", 200, -1, -1)


def test_the_first_format(tmp_path: Path) -> None:
    """It counted all operations together, named no types and no groups' ranks."""
    old = entry(seq_id=9, process_group="default")
    for name in ("collective_seq_id", "p2p_seq_id", "input_dtypes", "output_dtypes", "is_p2p"):
        del old[name]
    old["process_group"] = ("0", "default_pg")
    path = dumped(tmp_path, old, version="1.5", pg_config={})
    (row,) = read_flight_recorder(path).collectives.to_dict("records")
    assert (row["sequence"], row["bytes"], row["ranks"]) == (9, -1, -1)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_3", 3), ("comm_lib_trace_12", 12), ("ddp.rank1.flight", 1), ("7", 7), ("dump", None)],
)
def test_the_rank_is_in_the_name(name: str, rank: int | None, tmp_path: Path) -> None:
    path = dumped(tmp_path, entry(), name=name)
    assert read_flight_recorder(path).rank == rank
    assert read_flight_recorder(path, rank=5).rank == 5


def test_json_says_the_same_as_the_pickle() -> None:
    for rank in range(2):
        pickled, plain = (read_flight_recorder(DUMPS / f"gloo_trace_rank_{rank}{suffix}") for suffix in ("", ".json"))
        assert pickled.rank == plain.rank == rank
        assert pickled.collectives.equals(plain.collectives)
        # three times 1,000 floats, [5, 3] floats of two ranks, and a barrier
        assert pickled.collectives["bytes"].tolist() == [4000, 4000, 4000, 120, 0]
        assert pickled.collectives["communicator"].tolist() == ["0", "0", "0", "1", "0"]


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0.json"
    text = (DUMPS / "gloo_trace_rank_0.json").read_text()
    path.write_text(text.replace('"is_p2p"', '"is_p2p": true, "is_p2p"', 1))
    with pytest.raises(CaptureError, match="'is_p2p' appears twice"):
        read_flight_recorder(path)


def test_two_gpus_pair_their_sends() -> None:
    """Two stages of a pipeline: each send of one is a receive of the other, of as many bytes."""
    first, second = (read_flight_recorder(DUMPS / f"pipeline-layer.rank{rank}.flight").collectives for rank in range(2))
    for sender, receiver in ((first, second), (second, first)):
        sent = sender[sender["kind"] == "send"].set_index("sequence")["bytes"]
        received = receiver[receiver["kind"] == "recv"].set_index("sequence")["bytes"]
        assert len(sent) > 40 and sent.equals(received)
    # the second stage is slow, so the first one waits for its gradients
    waited = [one.loc[one["kind"] == "recv", "duration_ns"].sum() for one in (first, second)]
    assert waited[0] > 1.5 * waited[1]


def test_a_pipeline_without_a_profile_is_replayed() -> None:
    """Of ranks without a profile only the matched messages are compared, so their numbers have gaps."""
    found = open_job([DUMPS / f"pipeline-layer.rank{rank}.flight" for rank in range(2)], workers=1).answer()
    assert found.waits["wait_ns"].sum() > 0


def test_two_gpus_of_which_one_is_late() -> None:
    """DDP with more work in a layer of rank 1: rank 0 waits in the collectives, rank 1 does not."""
    lasted = [
        read_flight_recorder(DUMPS / f"ddp-layer.rank{rank}.flight").collectives.query("kind == 'all_reduce'")
        for rank in range(2)
    ]
    assert lasted[0]["bytes"].tolist() == lasted[1]["bytes"].tolist()
    assert lasted[0]["duration_ns"].sum() > 3 * lasted[1]["duration_ns"].sum()


class Nasty:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"version": "2.10", "entries": [Nasty()]}), "nothing in it was run"),
        (pickle.dumps({"segments": [], "device_traces": []}), "not a dump of PyTorch's Flight Recorder"),
        (pickle.dumps({"version": "2.10", "entries": [1]}), "not a dump of PyTorch's Flight Recorder"),
        (pickle.dumps({"version": "2.10", "entries": [{}]}), "KeyError 'profiling_name'"),
        (pickle.dumps({"version": "2.10", "entries": [entry(time_created_ns=1 << 70)]}), "invalid entries"),
        (pickle.dumps({"version": "2.10", "entries": []})[:-9], "pickle data was truncated"),
        (b"", "not a pickle, or a damaged one"),
        (b'{"version": "2.10", "entr', "damaged JSON"),
        (json.dumps({"version": "2.10"}).encode(), "not a dump of PyTorch's Flight Recorder"),
    ],
)
def test_what_is_no_dump(content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dump_0"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=message) as raised:
        read_flight_recorder(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    assert not (tmp_path / "pwned").exists()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no such file"):
        read_flight_recorder(tmp_path / "none_0")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("duration_ms", -3.0, "duration_ns of collectives is -3000000"),
        ("time_created_ns", -5, "time_created_ns is -5"),
        ("time_created_ns", "12", "'12' is no whole number"),
        ("time_created_ns", 2**63 + 5, "is no whole number of 64 bits"),
        ("time_discovered_completed_ns", 1000, "end before they begin"),
        ("collective_seq_id", -7, "collective_seq_id is -7"),
        ("output_sizes", [[-5]], "output_sizes has a negative length"),
    ],
)
def test_what_no_recorder_writes_is_refused_by_name(tmp_path: Path, key: str, value: object, complaint: str) -> None:
    entry = {
        "profiling_name": "nccl:all_reduce",
        "process_group": ["0", ""],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "state": "completed",
        "time_created_ns": 1000,
        "time_discovered_started_ns": 2000,
        "time_discovered_completed_ns": 3000,
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
    }
    (path := tmp_path / "nccl_trace_rank_0.json").write_text(json.dumps({"version": "2.4", "entries": [entry]}))
    assert read_flight_recorder(path).collectives["bytes"].tolist() == [16]
    path.write_text(json.dumps({"version": "2.4", "entries": [entry | {key: value}]}))
    with pytest.raises(CaptureError, match=complaint):
        read_flight_recorder(path)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("collective_seq_id", -1, "collective_seq_id is -1"),
        ("collective_seq_id", 1 << 62, "sequence of collectives is 4611686018427387904"),
        ("time_created_ns", -5, "time_created_ns is -5"),
        ("process_group", "default_pg", "process_group is 'default_pg', no list of names"),
        ("process_group", ["0", 7], "no list of names"),
        ("is_p2p", None, "is_p2p is missing in 1 of"),
        ("is_p2p", "no", "is_p2p is 'no'"),
        ("p2p_seq_id", None, "p2p_seq_id is missing in 1 of"),
        ("state", 7, "state is 7; needed one of scheduled, started, completed"),
        ("state", None, "state is missing in 1 of"),
        ("time_created_ns", None, "time_created_ns is missing in 1 of"),
    ],
)
def test_one_wrong_field_is_refused_by_name(tmp_path: Path, field: str, value: object, said: str) -> None:
    """-1 stands for unknown in the table, not in the file."""
    dump = pickle.loads((DUMPS / "ddp-layer.rank0.flight").read_bytes())
    dump["entries"][63][field] = value
    (tmp_path / "x.rank0.flight").write_bytes(pickle.dumps(dump))
    with pytest.raises(CaptureError, match=said):
        read_flight_recorder(tmp_path / "x.rank0.flight")
