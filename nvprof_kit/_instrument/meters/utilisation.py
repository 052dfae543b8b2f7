"""`Utilisation`: what CPU and GPU are busy with while a program runs, sampled by a thread of the process.

CPU figures come from psutil, GPU figures from NVIDIA's management library through nvidia-ml-py. The library's GPU
utilisation is the share of its own last sample period (up to a second) in which a kernel ran; over a shorter window,
the trace's ``GPU busy`` is the figure to trust.
"""

from __future__ import annotations

import csv
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from nvprof_kit._instrument.ranges import state
from nvprof_kit._instrument.rank_claim import claim
from nvprof_kit._instrument.ranks import rank_folder
from nvprof_kit.errors import ToolError

COLUMNS = {
    "seconds": "since sampling began",
    "device": "GPU as the process sees it; none for the CPU's sample",
    "cpu_process_percent": "CPU time of the process over elapsed time: 100 for each core that it keeps busy",
    "cpu_system_percent": "busy time of all cores over all their time",
    "process_bytes": "resident memory of the process",
    "gpu_percent": "share of the library's last sample period in which a kernel ran",
    "gpu_memory_bytes": "memory in use on the GPU, by every process",
    "power_watts": "power draw of the board",
    "temperature_celsius": "temperature of the GPU",
    "sm_clock_mhz": "clock of the multiprocessors",
}
"""The columns of the csv; a row for the CPU and one for each GPU at each sample."""


@dataclass(frozen=True)
class Sample:
    """The values of one row, by the names of `COLUMNS`."""

    seconds: float
    device: int | None
    values: dict[str, float]


class Utilisation:
    """Sample CPU and GPU; a context manager, or `start` and `stop`, as often as wanted.

    ```python
    with Utilisation(folder="traces"):
        train()
    ```

    leaves ``traces/rank0_dp0_tp0_pp0/utilisation.csv``. Under ``NVPROF_KIT=off`` nothing is sampled.

    Args:
        interval_s: Seconds between samples.
        folder: Holds a folder for each rank; None writes nothing.
        mesh: As for `nvprof_kit._instrument.ranks.rank_folder`.

    Attributes:
        samples: The samples since the last start.

    Raises:
        ToolError: psutil or nvidia-ml-py is not installed. A machine without a GPU gives the CPU alone.
    """

    def __init__(self, interval_s: float = 0.1, folder: str | Path | None = None, mesh: Any = None) -> None:
        self._psutil: Any = None
        self._nvml: Any = None
        if state.mode != "off":
            self._psutil, self._nvml = _libraries()
        self._interval = max(interval_s, 0.001)
        self._folder, self._mesh = folder, mesh
        self.samples: list[Sample] = []
        self._gpus: dict[int, Any] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> Utilisation:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process != os.getpid():  # forked meanwhile: the samples are the parent's
            return
        self.stop()
        if self._folder is not None and self.samples:
            folder = Path(self._folder) / rank_folder(self._mesh)
            try:
                self.write(claim(folder) / "utilisation.csv")
            except OSError as error:  # the program does not die of it
                warnings.warn(f"{folder}: cannot write utilisation.csv there ({error.strerror})", stacklevel=2)

    def start(self) -> None:
        """Forget earlier samples and begin."""
        if state.mode == "off" or (self._thread is not None and self._process == os.getpid()):
            return
        self._process = os.getpid()
        self.samples = []
        self._gpus = _gpus(self._nvml)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvprof_kit utilisation", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join()
            self._gpus = {}

    def write(self, path: Path) -> None:
        """Write the samples as csv."""
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
            rows.writeheader()
            for one in self.samples:
                device = "" if one.device is None else one.device
                rows.writerow({"seconds": f"{one.seconds:.3f}", "device": device, **one.values})

    def lines(self) -> list[str]:
        """The means in a line for the CPU and one for each GPU."""
        devices = dict.fromkeys(one.device for one in self.samples)
        return [_line(device, [one.values for one in self.samples if one.device == device]) for device in devices]

    def _run(self) -> None:
        process = self._psutil.Process(os.getpid())
        process.cpu_percent(), self._psutil.cpu_percent()  # the first answers are of no stretch of time
        began, latest, ended = time.perf_counter(), 0.0, False
        while not ended:
            ended = self._stopping.wait(self._interval)
            seconds = time.perf_counter() - began
            if ended and latest and seconds - latest < self._interval / 2:
                return  # too short for a share of it to mean anything
            latest = seconds
            with suppress(Exception):  # a process that ends, a counter that is not served: no reason to die
                cpu = {
                    "cpu_process_percent": process.cpu_percent(),
                    "cpu_system_percent": self._psutil.cpu_percent(),
                    "process_bytes": process.memory_info().rss,
                }
                self.samples.append(Sample(seconds, None, cpu))
            for device, handle in self._gpus.items():
                values = _gpu_values(self._nvml, handle)
                if values:
                    self.samples.append(Sample(seconds, device, values))


def _libraries() -> tuple[Any, ModuleType]:
    try:
        import psutil
        import pynvml
    except ImportError as error:
        raise ToolError(
            f"utilisation needs psutil and nvidia-ml-py ({error.name} is missing); "
            'pip install "nvprof-kit[utilisation]"'
        ) from None
    return psutil, pynvml


def _gpus(nvml: Any) -> dict[int, Any]:
    """Handles of the GPU that the process computes on, or of all that it may, by ordinal; none without a driver."""
    try:
        nvml.nvmlInit()
        names = _visible(nvml)
    except Exception:  # no driver, or one that does not serve
        return {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        own = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(own), "uuid", None)  # CUDA may count in another order
        names = {own: f"GPU-{uuid}" if uuid else names.get(own, own)}
    handles = {}
    for device, name in names.items():
        with suppress(Exception):
            by_uuid = nvml.nvmlDeviceGetHandleByUUID
            handles[device] = nvml.nvmlDeviceGetHandleByIndex(name) if isinstance(name, int) else by_uuid(name)
    return handles


def _visible(nvml: Any) -> dict[int, int | str]:
    """The library's index or UUID of each GPU, by the ordinal that the process sees."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return {device: device for device in range(nvml.nvmlDeviceGetCount())}
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return {device: int(name) if name.isdecimal() else name for device, name in enumerate(names)}


def _gpu_values(nvml: Any, handle: Any) -> dict[str, float]:
    """What the library tells of a GPU; what it does not serve is left out."""
    asked: dict[str, Callable[[], float]] = {
        "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    }
    values = {}
    for name, ask in asked.items():
        with suppress(Exception):
            values[name] = ask()
    return values


def _line(device: int | None, rows: list[dict[str, float]]) -> str:
    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return fmean(values) if values else None

    if device is None:
        told = [("process", "cpu_process_percent", "{:.1f} %"), ("system", "cpu_system_percent", "{:.1f} %")]
        head = "CPU"
    else:
        head = f"GPU {device}"
        told = [
            ("utilisation", "gpu_percent", "{:.1f} %"),
            ("power", "power_watts", "{:.0f} W"),
            ("temperature", "temperature_celsius", "{:.0f} °C"),
            ("SM clock", "sm_clock_mhz", "{:.0f} MHz"),
        ]
    parts = [f"{name} {form.format(mean(key))}" for name, key, form in told if mean(key) is not None]
    return f"{head}: {', '.join(parts)} (mean of {len(rows)} samples)"
