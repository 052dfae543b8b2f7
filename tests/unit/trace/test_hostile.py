"""Inputs that no profiler writes: each is refused or warned of by the name that the wrong thing has in the file."""

import gzip
import json
import lzma
import os

import pytest
from support.captures.kineto_file import event, kernel, write
from support.data import unpacked

import nvprof_kit
from nvprof_kit._api.capture import read_rules
from nvprof_kit._trace.files import packed
from nvprof_kit._trace.flops_file import read_flops
from nvprof_kit._trace.kineto import stream
from nvprof_kit._trace.open import open_capture, open_ncu, open_snapshot
from nvprof_kit._trace.timer_log import read_timer_logs
from nvprof_kit.errors import CaptureError

CALL, KERNEL = kernel("gemm", 4.0, 2.0, 1.0, 5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dur": -3}, "end before they begin"),
        ({"ts": float("nan")}, "ts is nan in 1 events|no ts"),
        ({"args": [1]}, r"no kernel event has args\.device"),
        ({"args": {"device": 0, "correlation": 2**70}}, r"no kernel event has args\.correlation"),
    ],
)
def test_values_that_cannot_be_are_named(tmp_path, changed, said):
    path = write(tmp_path / "a.json", [KERNEL | changed, CALL])
    with pytest.raises(CaptureError, match=said):
        open_capture(path)


def test_ids_as_large_as_they_come_and_times_as_text(tmp_path):
    call, run = kernel("gemm", "4.5", "1.25", 1.0, 2**64 - 2, device="0")
    path = write(tmp_path / "a.json", [run, call])
    read = open_capture(path)
    assert read.ops["correlation"].tolist() == read.api["correlation"].tolist() == [-2]
    assert (read.ops["end_ns"] - read.ops["start_ns"]).tolist() == [1250]


@pytest.mark.parametrize("window", [16, 4 << 20])
def test_an_event_longer_than_the_window_and_a_header_behind_the_events(window, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_WINDOW", window)
    events = [event("cpu_op", "aten::mm", float(number), 2.0) for number in range(50)]
    path = write(tmp_path / "a.json", events, schemaVersion=12)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2).replace('"aten::mm"', '"aten::mm """'))
    read = open_capture(path)
    assert read.info.schema == "12"
    assert len(read.calls if read.calls is not None else read.ops) == 50
    for text, told in (
        (path.read_text()[:-40], "cut off at character"),
        ('{"traceEvents": [{"ts": 0.', "cut off at character"),
        ('{"traceEvents": [{"name": """}]}', "a quote"),  # PyTorch writes quotes in names as they are
    ):
        path.write_text(text)
        with pytest.raises(CaptureError, match=told):
            open_capture(path)


def test_what_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_LEAST", 1 << 20)
    monkeypatch.setattr(packed, "_RATIO", 10)
    for name, content, read in (
        ("a.json.gz", gzip.compress(b'{"traceEvents": [' + b" " * (5 << 20)), open_capture),
        ("a.sqlite.xz", lzma.compress(b"SQLite format 3\0" + bytes(5 << 20)), open_capture),
        ("a.csv.xz", lzma.compress(bytes(5 << 20)), open_ncu),
    ):
        (path := tmp_path / name).write_bytes(content)
        with pytest.raises(CaptureError, match="unpacks to more than 1 MB"):
            read(path)


TIMER = "[RANK 0] forward, start=10.000000, end=11.000000, cpu_dur=1.0s, cuda_dur=900.0ms\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (TIMER, ["1 of its lines stand in it twice, and count once"]),
        (TIMER.replace("RANK 0", "RANK 999999999999"), ["1 of its lines is no timer's and left out"]),
        (TIMER.replace("=10", "=" + "9" * 40), ["1 of its lines is no timer's and left out"]),
        (TIMER.replace("end=11", "end=9"), ["1 of its lines have an end before their start, and are left out"]),
        (
            TIMER.replace("10.", "12.").replace("11.", "13.").replace("cpu_dur=1.0s", "cpu_dur=1000.0s"),
            ["cpu_dur is not the time from start to end in 1 of its lines"],
        ),
    ],
)
def test_timer_lines_that_cannot_be_are_named(tmp_path, more, said):
    (path := tmp_path / "timer_rank0.log").write_text(TIMER + more)
    logs = read_timer_logs([path])
    assert len(logs.stages) == (2 if "cpu_dur" in said[0] else 1)
    assert [warning.partition(": ")[2].partition(";")[0] for warning in logs.warnings] == said


def test_timers_of_years_are_refused(tmp_path):
    (path := tmp_path / "timer_rank0.log").write_text(
        TIMER + TIMER.replace("10.", "5000000010.").replace("11.", "5000000011.")
    )
    with pytest.raises(CaptureError, match="more than 100 days apart"):
        read_timer_logs([path])


@pytest.mark.parametrize("read", [open_capture, open_ncu, open_snapshot, read_flops,
                                  lambda path: read_timer_logs([path]), read_rules])  # fmt: skip
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(pipe := tmp_path / "run.sqlite")
    (device := tmp_path / "run.json").symlink_to("/dev/zero")
    for path, what in ((pipe, "a pipe, which is read once"), (device, "a device")):
        with pytest.raises(CaptureError, match=f"{what}; needed a file"):
            read(path)


def test_the_reader_of_ncu_reports_imports_nothing_of_the_current_folder(tmp_path, monkeypatch):
    pytest.importorskip("ncu_report")
    unpacked("ncu/own-2025.3.ncu-rep.xz", tmp_path / "own.ncu-rep")
    (tmp_path / "json.py").write_text("open('it-ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert len(open_ncu("own.ncu-rep").kernels)
    assert not (tmp_path / "it-ran").exists()


HEADER = '"ID","Process ID","Kernel Name","gpu__time_duration.sum"'


@pytest.mark.parametrize(
    ("unit", "value", "complaint"),
    [
        ("ns", "-5", "gpu__time_duration.sum is -5 in 1 result"),
        ("ns", "1e300", r"gpu__time_duration.sum is 1e\+300"),
        ("s", "281600", r"gpu__time_duration.sum is 2.816e\+14"),  # three days
        ("%", "2816", "gpu__time_duration.sum is in '%', which is no time"),
        ("cycle", "2816", "gpu__time_duration.sum is in 'cycle', which is no time"),
    ],
)
def test_a_page_of_ncu_with_a_duration_that_is_none_is_refused(tmp_path, unit, value, complaint):
    (path := tmp_path / "a.csv").write_text(f'{HEADER}\n"","","","{unit}"\n"0","7","gemm","{value}"\n')
    with pytest.raises(CaptureError, match=complaint):
        open_ncu(path)


def test_of_a_page_of_ncu_an_implausible_value_of_another_metric_is_left_out(tmp_path):
    rows = '"","","","ns","inst"\n"0","7","gemm","5","-3"\n"1","7","gemm","5","4"\n'
    (path := tmp_path / "a.csv").write_text(f'{HEADER},"a.sum"\n{rows}')
    report = open_ncu(path)
    assert report.metrics["a.sum"].tolist()[1:] == [4] and report.metrics["a.sum"].isna().tolist() == [True, False]
    assert "a.sum is -3 in 1 result: left out" in report.warnings[-1]


def test_a_page_of_ncu_with_a_column_or_results_twice(tmp_path):
    row = '"0","7","gemm","5"\n'
    (path := tmp_path / "a.csv").write_text(f'{HEADER}\n"","","","ns"\n{row}{row}')
    warnings = nvprof_kit.open_ncu(path).report.warnings
    assert "1 of 2 results stand there twice (ID and Process ID), and count twice" in warnings[-1]
    path.write_text(f'{HEADER},"gpu__time_duration.sum"\n"","","","ns","ns"\n"0","7","gemm","5","6"\n')
    with pytest.raises(CaptureError, match=r"the column gpu__time_duration.sum stands there twice"):
        open_ncu(path)
