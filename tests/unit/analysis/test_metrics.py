"""GPU metrics of each layer: both forms of the samples, means over busy time, the floor."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.captures.nsys_file import NsysFile
from support.data import DATA

import nvprof_kit
from nvprof_kit.errors import CaptureError

H200 = DATA / "metrics" / "llama-2023.4.sqlite.xz"


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    """The ranges; the kernels come with `samples`."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 100_000, category="step")
    file.range_("m.0", 0, 500, category="forward")
    file.range_("m.0.mlp", 10, 200, category="forward")
    file.range_("m.1", 600, 900, category="forward")
    return file


def samples(file: NsysFile, rounds: int) -> dict[int, int]:
    """SM active every 100 ns, in rounds of 500 ns. In each, m.0 runs 0-100 and 250-300, m.1 300-350; else idle."""
    sm_active = {}
    for number in range(rounds):
        zero, launch = 500 * number, 2 * number
        file.kernel(zero, zero + 100, launched=(11 + launch, 12 + launch))
        file.kernel(zero + 250, zero + 300, launched=(300 + launch, 301 + launch))
        file.kernel(zero + 300, zero + 350, launched=(601 + launch, 602 + launch))
        sm_active |= {zero + 100 * place: value for place, value in enumerate((80, 0, 20, 30, 0))}
    return sm_active


def with_table(file: NsysFile, rounds: int = 40) -> Path:
    sm_active = samples(file, rounds)
    file.sample("SM Active [Throughput %]", sm_active)
    file.sample("Compute Warps in Flight [Avg]", dict.fromkeys(sm_active, 999))
    file.sample("PCIe RX Throughput [Throughput %]", dict.fromkeys(sm_active, 1))
    return file.write()


def with_events(file: NsysFile) -> Path:
    """As nsys 2022 exports them: json whose numbers are in quotes."""
    events = [(1, 5, '{"ftrace": "1"}')]
    for time, value in samples(file, 40).items():
        data = {"SM Active": str(value), "PCIe RX Throughput": "1", "GPU": "NVIDIA H200"}
        events.append((time, 1 << 48, json.dumps(data)))
    file.rows["GENERIC_EVENTS"] = [
        {"rawTimestamp": time + 12345, "timestamp": time, "typeId": type_id, "data": data}
        for time, type_id, data in events
    ]
    return file.write()


@pytest.mark.parametrize("form", [with_table, with_events])
def test_means_over_busy_time(file, form):
    result = nvprof_kit.open(form(file)).metrics()
    assert list(result.rows) == list(nvprof_kit.Metrics.columns["metrics"])
    # Busy parts of the intervals at 0, 200, 300: 100, 50, 50 of 100, so SM active while busy: 80, 20/0.5, 30/0.5.
    # m.0: (100*80 + 50*40) / 150 = 66.7, 1.5 samples a round; its mlp launched the first kernel: 80. m.1: 60, half a
    # sample a round.
    assert result.rows[["layer", "phase", "busy_ns", "samples", "enough"]].values.tolist() == [
        ["m.0", "forward", 40 * 150, 60, True],
        ["m.0.mlp", "forward", 40 * 100, 40, True],
        ["m.1", "forward", 40 * 50, 20, True],
    ]
    assert result.rows["sm_active_pct"].tolist() == pytest.approx([200 / 3, 80, 60])
    assert result.rows["pcie_rx_pct"].tolist() == pytest.approx([(100 * 1 + 50 * 2) / 150, 1, 2])
    assert result.rows["tensor_active_pct"].isna().all()
    assert result.overall["sm_active_pct"] == pytest.approx((100 * 80 + 50 * 40 + 50 * 60) / 200)
    assert (result.interval_ns, result.samples, result.steps) == (100, 200, 1)


def test_too_few(file):
    result = nvprof_kit.open(with_table(file, rounds=16)).metrics()
    assert result.rows["enough"].tolist() == [True, False, False]
    assert result.rows["sm_active_pct"].isna().tolist() == [False, True, True]
    lines = [line.split("  ") for line in str(result).splitlines() if line.startswith("m.") or line.startswith("  mlp")]
    assert ["67 %" in line or " 67 %" in line for line in lines] == [True, False, False], lines
    assert str(result).count("too few") == 3


def test_without_samples(file):
    samples(file, 1)
    with pytest.raises(CaptureError, match="no samples of GPU metrics; record with `nsys profile --gpu-metrics-device"):
        nvprof_kit.open(file.write()).metrics()


def test_h200():
    result = nvprof_kit.open(H200).metrics()
    rows = result.rows.set_index(["layer", "phase"])
    head = rows.loc[("lm_head", "backward")]
    assert head["enough"]
    assert 80 < head["tensor_active_pct"] < 90  # ncu: 88 % compute, bound by its tensor cores
    assert not rows.loc[("model.embed_tokens", "forward"), "enough"]
    assert result.interval_ns == pytest.approx(50_000, rel=0.01)
    figures = rows[[name for name in rows if name.endswith("_pct")]].to_numpy()
    assert ((figures >= 0) & (figures <= 100) | np.isnan(figures)).all()


def test_busy_times_are_those_of_layers():
    """Also of the outermost module, which is named by its class: no path begins with that."""
    busy = {(row.layer, row.phase): row.busy_ns for row in nvprof_kit.open(H200).metrics().rows.itertuples()}
    table = nvprof_kit.open(H200).layers().rows
    assert busy == {(row.layer, row.phase): row.gpu_busy_ns for row in table.itertuples() if row.gpu_busy_ns}
