"""Utilisation: the CPU for real, the GPU's library as it answers and as it fails."""

from __future__ import annotations

import csv
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

import nvprof_kit._instrument.session as session

pytest.importorskip("psutil")
pytest.importorskip("pynvml")

from nvprof_kit import Utilisation
from nvprof_kit.errors import ToolError


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_busy_process_is_seen(tmp_path: Path) -> None:
    with Utilisation(0.02, folder=tmp_path) as sampler:
        spin(0.4)
    busy = max(sample["cpu_process_percent"] for sample in sampler.samples if sample["device"] == "")
    assert busy > 20  # of one core; the machine may be busy with others
    rows = list(csv.DictReader((tmp_path / "rank0_dp0_tp0_pp0" / "utilisation.csv").open()))
    assert {"seconds", "device", "cpu_process_percent", "process_bytes"} <= rows[0].keys()
    assert int(rows[0]["process_bytes"]) > 1 << 20
    assert sampler.lines()[0].startswith("CPU: process ")
    assert sampler._thread is None


class Nvml(types.ModuleType):
    """Answers for two GPUs; the second one's board has no power meter."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(gpu=80 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=1 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise RuntimeError("not supported")
        return 412_000

    def nvmlDeviceGetTemperature(self, handle: int, _sensor: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, handle: int, _clock: int) -> int:
        return 1980


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_told_apart_and_what_is_not_served_is_left_out(nvml: None) -> None:
    with Utilisation(0.01) as sampler:
        time.sleep(0.05)
    first, second = sampler.lines()[1:]
    assert first.startswith("GPU 0: utilisation 80.0 %, power 412 W, temperature 61 °C, SM clock 1980 MHz")
    assert second.startswith("GPU 1: utilisation 81.0 %, temperature 61 °C")


def test_off_means_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "mode", "off")
    with Utilisation(0.01) as sampler:
        assert sampler._thread is None
    assert sampler.samples == []


@pytest.mark.parametrize("missing", ["psutil", "pynvml"])
def test_a_missing_library_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ToolError, match=r'pip install "nvprof-kit\[utilisation\]"'):
        Utilisation()


def test_a_program_that_ends_while_it_samples_ends() -> None:
    code = "from nvprof_kit import Utilisation\nUtilisation(0.01).start()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_gpus_go_by_the_ordinal_that_the_process_sees(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b, 0")
    with Utilisation(0.01) as sampler:
        time.sleep(0.05)
    first, second = sampler.lines()[1:]
    assert first.startswith("GPU 0: utilisation 81.0 %") and second.startswith("GPU 1: utilisation 80.0 %")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Utilisation(0.01) as sampler:
        time.sleep(0.05)
    assert not any("GPU" in line for line in sampler.lines())


def test_the_gpu_is_that_of_the_thread_that_starts(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: int(threading.get_ident() == mine))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: None)
    with Utilisation(0.01) as sampler:
        time.sleep(0.05)
    assert [line.partition(":")[0] for line in sampler.lines()[1:]] == ["GPU 1"]
