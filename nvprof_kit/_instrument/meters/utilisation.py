"""`Utilisation`: CPU and GPU utilization while a program runs, sampled by a thread of the process.

CPU figures come from psutil, GPU figures from NVML through nvidia-ml-py. NVML's GPU utilization is the percentage of
its own last sample period (up to one second) in which a kernel ran. For shorter windows, use ``GPU busy`` of the trace.
"""

from __future__ import annotations

import csv
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from nvprof_kit._instrument import session
from nvprof_kit._instrument.ranks import claim, rank_folder
from nvprof_kit._toml import read_toml
from nvprof_kit.errors import PATH, ToolError, require

_TABLE = read_toml("nvprof_kit._instrument.meters", "utilisation.toml")
COLUMNS: Mapping[str, str] = _TABLE["columns"]
_MEANS: Mapping[str, str] = _TABLE["means"]


class Utilisation:
    """Sample CPU and GPU utilization; a context manager, or call `start` and `stop`.

    ```python
    with Utilisation(folder="traces"):
        train()
    ```

    This writes ``traces/rank0_dp0_tp0_pp0/utilisation.csv``. CPU figures are psutil's, GPU figures NVML's. Without a
    GPU, only the CPU is sampled. With ``NVPROF_KIT=off`` nothing is sampled.

    Args:
        interval_s: Seconds between samples.
        folder: Output folder; each rank writes to its own subfolder. None writes nothing.
        mesh: The ``DeviceMesh`` with dimensions ``dp``, ``tp``, ``pp`` that names the subfolder.

    Attributes:
        samples: The samples since the last start, by column of `COLUMNS`; ``device`` is '' for the CPU.

    Raises:
        ToolError: psutil or nvidia-ml-py is not installed.
    """

    def __init__(self, interval_s: float = 0.1, folder: str | Path | None = None, mesh: Any = None) -> None:
        require(interval_s, (int, float), "Utilisation: interval_s", "a number of seconds")
        require(folder, (*PATH, type(None)), "Utilisation: folder", "a path")
        if session.mode != "off":
            try:
                import psutil
                import pynvml
            except ImportError as error:
                raise ToolError.of("no-utilisation", library=error.name) from None
            self._psutil: Any = psutil
            self._nvml: Any = pynvml
        self._interval = max(interval_s, 0.001)
        self._folder, self._mesh = folder, mesh
        self.samples: list[dict[str, Any]] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> Utilisation:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process != os.getpid():  # the process has forked: the samples belong to the parent
            return
        self.stop()
        if self._folder is not None and self.samples:
            folder = Path(self._folder) / rank_folder(self._mesh)
            try:
                self.write(claim(folder) / "utilisation.csv")
            except OSError as error:  # a failed write must not end the program
                warnings.warn(f"{folder}: cannot write utilisation.csv there ({error.strerror})", stacklevel=2)

    def start(self) -> None:
        """Discard earlier samples and start sampling."""
        if session.mode == "off" or (self._thread is not None and self._process == os.getpid()):
            return
        self._process = os.getpid()
        self.samples = []
        self._stopping = threading.Event()
        counters = self._counters()  # here, because CUDA's current device is that of the thread
        self._thread = threading.Thread(target=self._run, args=[counters], name="nvprof_kit utilisation", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop sampling."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join()

    def write(self, path: Path) -> None:
        """Write the samples as CSV."""
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
            rows.writeheader()
            rows.writerows(sample | {"seconds": f"{sample['seconds']:.3f}"} for sample in self.samples)

    def lines(self) -> list[str]:
        """The means as text: one line for the CPU and one per GPU."""
        lines = []
        for device in dict.fromkeys(sample["device"] for sample in self.samples):
            samples = [sample for sample in self.samples if sample["device"] == device]
            values = {name: [sample[name] for sample in samples if name in sample] for name in _MEANS}
            means = ", ".join(_MEANS[name].format(fmean(numbers)) for name, numbers in values.items() if numbers)
            title = "CPU" if device == "" else f"GPU {device}"
            lines.append(f"{title}: {means} (mean of {len(samples)} samples)")
        return lines

    def _counters(self) -> dict[int | str, dict[str, Any]]:
        """How to read each figure, by device."""
        process, nvml = self._psutil.Process(), self._nvml
        cpu = {"cpu_process_percent": process.cpu_percent, "cpu_system_percent": self._psutil.cpu_percent}
        counters: dict[int | str, dict[str, Any]] = {"": {**cpu, "process_bytes": lambda: process.memory_info().rss}}
        for device, gpu in _gpus(nvml).items():
            counters[device] = {
                "gpu_percent": lambda gpu=gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                "gpu_memory_bytes": lambda gpu=gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
                "power_watts": lambda gpu=gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
                "temperature_celsius": lambda gpu=gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                "sm_clock_mhz": lambda gpu=gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            }
        return counters

    def _run(self, counters: dict[int | str, dict[str, Any]]) -> None:
        for name in ("cpu_process_percent", "cpu_system_percent"):
            counters[""][name]()  # the first call has no interval to measure
        start, latest, ended = time.perf_counter(), 0.0, False
        while not ended:
            ended = self._stopping.wait(self._interval)
            seconds = time.perf_counter() - start
            if ended and latest and seconds - latest < self._interval / 2:
                return  # too short for a meaningful percentage
            latest = seconds
            for device, of_device in counters.items():
                values = {}
                for name, read in of_device.items():
                    with suppress(Exception):  # a counter that is not supported is left out
                        values[name] = read()
                if values:
                    self.samples.append({"seconds": seconds, "device": device, **values})


def _gpus(nvml: Any) -> dict[int, Any]:
    """Handles by ordinal: the current device, or all visible ones without CUDA context; none without a driver."""
    try:
        nvml.nvmlInit()
        all_devices = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
    except Exception:  # no driver, or the driver does not respond
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_devices).replace(" ", "").split(",")
    names = dict(enumerate(filter(None, visible)))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():  # CUDA's device order may differ from NVML's
        current = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(current), "uuid", None)
        names = {current: f"GPU-{uuid}" if uuid else names.get(current, str(current))}
    handles = {}
    for device, name in names.items():
        with suppress(Exception):
            handle_of = nvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
            handles[device] = handle_of(int(name) if name.isdecimal() else name)
    return handles
