"""GPU operations of several tables, processes, devices and graphs; columns with one value are not read row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.captures import as_kineto
from support.captures.nsys_file import NsysFile, thread

from nvprof_kit._trace.open import open_capture


def _file(folder: Path, more: Callable[[NsysFile], object] = lambda _: None) -> Path:
    file = NsysFile(folder / "run.sqlite")
    file.range_("layers.0", 100, 900)
    for start in (300, 400):
        file.kernel(start, start + 10, launched=(start - 100, start - 90))
    file.kernel(500, 520, launched=(450, 460), table="MEMCPY")
    more(file)
    return file.write()


@pytest.mark.parametrize(
    ("table", "what", "expected"),
    [
        ("KERNEL", {"device": 1}, {"device": [0, 0, 1, 0]}),
        ("KERNEL", {"node": 5}, {"graph_node": [-1, -1, 5, -1]}),
        ("KERNEL", {"pid": 8}, {"pid": [thread(0, 7), thread(0, 7), thread(0, 8), thread(0, 7)]}),
        ("MEMCPY", {"device": 1}, {"device": [0, 0, 0, 1]}),
        ("MEMSET", {"device": 2}, {"device": [0, 0, 0, 2]}),
    ],
)
def test_one_row_of_another_value_is_read(
    tmp_path: Path, table: str, what: dict[str, int], expected: dict[str, list[int]]
) -> None:
    # the added row is the last of its table: kernels come before copies, and these before memsets
    path = _file(tmp_path, lambda file: file.kernel(600, 610, launched=(550, 560), table=table, **what))  # type: ignore[arg-type]
    ops = open_capture(path).ops
    assert {name: ops[name].tolist() for name in expected} == expected


def test_calls_and_the_hosts_end_of_copies_are_those_of_a_pytorch_trace(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.kernel(300, 330, launched=(110, 115))
    file.call("cudaStreamSynchronize_v3020", 120, 340)
    for start, kind, memory in ((350, 1, (0, 2)), (360, 2, (2, 1)), (370, 8, (2, 2))):
        file.kernel(
            start, start + 9, launched=(start - 220, start - 218), table="MEMCPY", copy_kind=kind, memory=memory
        )
    file.write()
    as_kineto.write(file.path, tmp_path / "run.json.gz")
    file.overhead("CUPTI: Buffer flush", 150, 160)
    read = [open_capture(path, optional=("calls", "host_memory")) for path in (file.write(), tmp_path / "run.json.gz")]
    for trace in read:
        calls = trace.calls
        assert calls is not None
        api, overhead = calls[calls["kind"] == 0].sort_values("start_ns"), calls[calls["kind"] == 1]
        assert api["name"].tolist() == ["cudaLaunchKernel", "cudaStreamSynchronize", *["cudaLaunchKernel"] * 3]
        assert (api["end_ns"] - api["start_ns"]).tolist() == [5, 220, 2, 2, 2]
        assert calls["tid"].nunique() == calls["pid"].nunique() == 1
        assert trace.ops.sort_values("start_ns")["host_memory"].tolist() == ["", "pageable", "pinned", ""]
        expected = [[150, 160, -1]] if trace is read[0] else []
        assert overhead[["start_ns", "end_ns", "correlation"]].to_numpy().tolist() == expected
