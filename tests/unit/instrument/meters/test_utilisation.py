"""Utilisation: the CPU for real, the GPU's library as it answers and as it fails."""

import csv
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

import nvprof_kit._instrument.session as session

pytest.importorskip("psutil")
pytest.importorskip("pynvml")

from nvprof_kit import Utilisation
from nvprof_kit.errors import ToolError


def test_a_busy_process_is_seen(tmp_path):
    with Utilisation(0.02, folder=tmp_path) as sampler:
        end = time.perf_counter() + 0.4
        while time.perf_counter() < end:
            pass
    busy = max(sample["cpu_process_percent"] for sample in sampler.samples if sample["device"] == "")
    assert busy > 20  # of one core; the machine may be busy with others
    rows = list(csv.DictReader((tmp_path / "rank0_dp0_tp0_pp0" / "utilisation.csv").open()))
    assert {"seconds", "device", "cpu_process_percent", "process_bytes"} <= rows[0].keys()
    assert int(rows[0]["process_bytes"]) > 1 << 20
    assert sampler.lines()[0].startswith("CPU: process ")
    assert sampler._thread is None


NVML = types.SimpleNamespace(
    NVML_TEMPERATURE_GPU=0,
    NVML_CLOCK_SM=0,
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetHandleByUUID={"GPU-b": 1}.__getitem__,
    nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=80 + handle),
    nvmlDeviceGetMemoryInfo=lambda _handle: types.SimpleNamespace(used=1 << 30),
    nvmlDeviceGetPowerUsage={0: 412_000}.__getitem__,
    nvmlDeviceGetTemperature=lambda _handle, _sensor: 61,
    nvmlDeviceGetClockInfo=lambda _handle, _clock: 1980,
)
"""Answers for two GPUs; the second one's board has no power meter."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


FIRST = "utilisation 80.0 %, power 412 W, temperature 61 °C, SM clock 1980 MHz"
SECOND = "utilisation 81.0 %, temperature 61 °C, SM clock 1980 MHz"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [f"GPU 0: {FIRST}", f"GPU 1: {SECOND}"]), ("GPU-b, 0", [f"GPU 0: {SECOND}", f"GPU 1: {FIRST}"]), ("", [])],
)
def test_gpus_go_by_the_ordinal_that_the_process_sees(nvml, monkeypatch, visible, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Utilisation(0.01) as sampler:
        time.sleep(0.05)
    assert [line.partition(" (mean of")[0] for line in sampler.lines()[1:]] == expected


def test_off_means_no_thread(monkeypatch):
    monkeypatch.setattr(session, "mode", "off")
    with Utilisation(0.01) as sampler:
        assert sampler._thread is None
    assert sampler.samples == []


@pytest.mark.parametrize("missing", ["psutil", "pynvml"])
def test_a_missing_library_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ToolError, match=r'pip install "nvprof-kit\[utilisation\]"'):
        Utilisation()


def test_a_program_that_ends_while_it_samples_ends():
    code = "from nvprof_kit import Utilisation\nUtilisation(0.01).start()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_gpu_is_that_of_the_thread_that_starts(nvml, monkeypatch):
    mine = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: int(threading.get_ident() == mine))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: None)
    with Utilisation(0.01) as sampler:
        time.sleep(0.05)
    assert [line.partition(":")[0] for line in sampler.lines()[1:]] == ["GPU 1"]
