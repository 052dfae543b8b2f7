"""GPU metrics of each layer: both forms of the samples, means over busy time, the floor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.captures.nsys_file import NsysFile
from support.cli import run

import nvprof_kit
from nvprof_kit.errors import CaptureError

H200 = Path(__file__).parents[2] / "data" / "metrics" / "llama-2023.4.sqlite.xz"


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    """Samples every 100 ns. m.0 runs 0-100 and 250-300, m.1 300-350; the rest is idle."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 1000, category="step")
    file.range_("m.0", 0, 500, category="forward")
    file.range_("m.0.mlp", 10, 20, category="forward")
    file.range_("m.1", 600, 900, category="forward")
    file.kernel(0, 100, launched=(11, 12))
    file.kernel(250, 300, launched=(30, 31))
    file.kernel(300, 350, launched=(601, 602))
    return file


SM = {0: 80, 100: 0, 200: 20, 300: 30, 400: 0}


def with_table(file: NsysFile) -> Path:
    file.sample("SM Active [Throughput %]", SM)
    file.sample("Compute Warps in Flight [Avg]", dict.fromkeys(SM, 999))
    file.sample("PCIe RX Throughput [Throughput %]", dict.fromkeys(SM, 1))
    return file.write()


def with_events(file: NsysFile) -> Path:
    """As nsys 2022 exports them: json whose numbers are in quotes."""
    events = [(1, 5, '{"ftrace": "1"}')]
    for time, value in SM.items():
        data = {"SM Active": str(value), "PCIe RX Throughput": "1", "GPU": "NVIDIA H200"}
        events.append((time, 1 << 48, json.dumps(data)))
    file.rows["GENERIC_EVENTS"] = [
        {"rawTimestamp": time + 12345, "timestamp": time, "typeId": type_id, "data": data}
        for time, type_id, data in events
    ]
    return file.write()


def measured(path: Path, floor: float = 1.0) -> nvprof_kit.Metrics:
    return nvprof_kit.open(path).metrics(floor=floor)


@pytest.mark.parametrize("form", [with_table, with_events])
def test_means_over_busy_time(file: NsysFile, form) -> None:
    result = measured(form(file), floor=0.5)
    assert list(result.rows) == list(nvprof_kit.Metrics.columns["metrics"])
    # Busy parts of the intervals at 0, 200, 300: 100, 50, 50 of 100, so SM active while busy: 80, 20/0.5, 30/0.5.
    # m.0: (100*80 + 50*40) / 150 = 66.7 in 1.5 samples; its mlp launched the first kernel: 80. m.1: 60, half a sample.
    assert result.rows[["layer", "phase", "busy_ns", "samples", "enough"]].values.tolist() == [
        ["m.0", "forward", 150, 1.5, True],
        ["m.0.mlp", "forward", 100, 1.0, True],
        ["m.1", "forward", 50, 0.5, True],
    ]
    assert result.rows["sm_active_pct"].tolist() == pytest.approx([200 / 3, 80, 60])
    assert result.rows["pcie_rx_pct"].tolist() == pytest.approx([(100 * 1 + 50 * 2) / 150, 1, 2])
    assert result.rows["tensor_active_pct"].isna().all()
    assert result.overall["sm_active_pct"] == pytest.approx((100 * 80 + 50 * 40 + 50 * 60) / 200)
    assert (result.interval_ns, result.samples, result.steps) == (100, 5, 1)


def test_too_few(file: NsysFile) -> None:
    result = measured(with_table(file), floor=1.2)
    assert result.rows["enough"].tolist() == [True, False, False]
    assert result.rows["sm_active_pct"].isna().tolist() == [False, True, True]
    lines = [line.split("  ") for line in str(result).splitlines() if line.startswith("m.") or line.startswith("  mlp")]
    assert ["67 %" in line or " 67 %" in line for line in lines] == [True, False, False], lines
    assert str(result).count("too few") == 3


def test_without_samples(file: NsysFile) -> None:
    with pytest.raises(CaptureError, match="no samples of GPU metrics; record with `nsys profile --gpu-metrics-device"):
        measured(file.write())


def test_h200() -> None:
    result = measured(H200, floor=20)
    rows = result.rows.set_index(["layer", "phase"])
    head = rows.loc[("lm_head", "backward")]
    assert head["enough"]
    assert 80 < head["tensor_active_pct"] < 90  # ncu: 88 % compute, bound by its tensor cores
    assert not rows.loc[("model.embed_tokens", "forward"), "enough"]
    assert result.interval_ns == pytest.approx(50_000, rel=0.01)
    figures = rows[[name for name in rows if name.endswith("_pct")]].to_numpy()
    assert ((figures >= 0) & (figures <= 100) | np.isnan(figures)).all()


def test_busy_times_are_those_of_layers() -> None:
    """Also of the outermost module, which is named by its class: no path begins with that."""
    busy = {(row.layer, row.phase): row.busy_ns for row in measured(H200).rows.itertuples()}
    table = nvprof_kit.open(H200).layers().rows
    assert busy == {(row.layer, row.phase): row.gpu_busy_ns for row in table.itertuples() if row.gpu_busy_ns}


def test_verb(file: NsysFile, capsys: pytest.CaptureFixture[str]) -> None:
    capture = with_table(file)
    assert run("metrics", capture, "--floor", 1) == 0
    out = capsys.readouterr().out
    assert "5 samples, one every 0.1 µs" in out
    assert "too few" in out
    assert run("metrics", capture, "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("layer,phase,busy_ns,samples,enough,sm_active_pct")
    assert run("metrics", capture, "-o", capture.with_name("a.png"), "--floor", 1) == 0
    assert capture.with_name("a.png").read_bytes().startswith(b"\x89PNG")
