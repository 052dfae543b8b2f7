"""Random training programs with planted faults, as nsys exports, to measure the precision and recall of `advise`.

A host launches kernels of a training loop, and runs ahead of the device as far as it can. A fault is drawn with its
size; sizes come from what such faults cost in programs, and not from the thresholds of the rules.
"""

import random
from pathlib import Path

from support.captures.nsys_file import NsysFile

US, MS = 1_000, 1_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM, FP32 = "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT", "ampere_sgemm_128x64_tn"
FAULTS = (
    "launch", "sync", "dataloader", "allocation", "loading", "gc", "exposed-collectives", "rank-wait", "unstable-step",
    "copies", "fp32-gemms", "recompute", "outlier-layer",
)  # fmt: skip
LOOKALIKES = ("early data", "late sync", "hidden allocation", "hidden garbage", "hidden communication", "pinned copies")
"""The same calls where they cost nothing: the device has work meanwhile, or nothing has to wait for it."""


class Program:
    """A training loop as a host and a device run it.

    Args:
        path: The export.
        seed: What everything is drawn from.
        faults: Which of `FAULTS` and `LOOKALIKES` are planted.
    """

    def __init__(self, path: Path, seed: int, faults: tuple[str, ...]) -> None:
        self._draw, self._faults, self._file = random.Random(seed), faults, NsysFile(path, "2024.2")
        draw = self._draw
        self._steps, self._layers = draw.randint(5, 8), draw.randint(6, 10)
        late = "launch" in faults
        # a host that is ahead launches in a fraction of what a kernel takes; one that is late needs a multiple
        self._kernel = draw.uniform(10, 25) * US if late else draw.uniform(80, 300) * US
        self._launch = self._kernel * draw.uniform(1.5, 4) if late else draw.uniform(6, 12) * US
        self._slow_layer = draw.randrange(self._layers) if "outlier-layer" in faults else -1
        self._factor = draw.uniform(1.5, 3)
        self._slow_step = draw.randrange(2, self._steps) if "unstable-step" in faults else -1
        self._kernels = draw.randint(4, 8)
        self._size = draw.uniform(0.05, 0.3)
        self._host, self._device, self._full = 0.0, 0.0, 0.0
        self._step = 0

    def write(self) -> Path:
        """Write the export."""
        for step in range(self._steps):
            self._step = step
            begin = self._host
            self._data()
            for number in range(self._layers):
                self._layer(number, "forward", 1, "forward")
            self._trouble()
            self._backward()
            self._communicate()
            updates = self._host
            self._run(2 * self._layers, self._kernel / 2, "multi_tensor_apply_adam")
            self._file.range_("optimizer", int(updates), int(self._host), category="optimizer")
            self._full = self._device - 2 * MS if self._step < self._steps - 1 else 0.0
            if self._step == self._steps - 1 and "late sync" in self._faults:
                self._call("cudaDeviceSynchronize_v3020", max(self._device - self._host, 0) + 10 * US)
            self._file.range_(f"step {self._step}", int(begin), int(self._host), category="step", payload=self._step)
        return self._file.write()

    @property
    def _work(self) -> float:
        """Durations of a step's kernels."""
        return self._kernel * self._kernels * self._layers * 3

    def _run(self, many: int, length: float, name: str = GEMM) -> None:
        for _ in range(many):
            took = length * self._draw.uniform(0.97, 1.03)
            if self._step == self._slow_step:
                took *= 1.8
            self._one(took, name)

    def _one(self, took: float, name: str, *, stream: int = 7, after: float = 0.0, **more: object) -> float:
        """Launch a kernel now; returns its end."""
        launched, self._host = self._host, max(self._host + self._launch, self._full)  # it waits if the queue is full
        start = max(self._host + 2 * US, after, self._device if stream == 7 else 0)
        at = (int(launched if self._host == self._full else max(launched, self._host - 5 * US)), int(self._host))
        self._file.kernel(int(start), int(start + took), launched=at, name=name, stream=stream, **more)
        if stream == 7:
            self._device = start + took
        return start + took

    def _call(self, name: str, took: float) -> None:
        self._file.call(name, int(self._host), int(self._host + took))
        self._host += took

    def _drained(self) -> None:
        """Synchronize: the host continues when the device is done."""
        self._host = max(self._host, self._device) + self._draw.uniform(5, 20) * US

    def _layer(self, number: int, kind: str, times: float, category: str) -> None:
        begin, length = self._host, self._kernel * times * (self._factor if number == self._slow_layer else 1)
        for place in range(self._kernels):
            single = "fp32-gemms" in self._faults and place % 3 == 0
            self._run(1, length, FP32 if single else GEMM.replace("64x4", f"64x{place}"))
        suffix = f" {kind}" if kind != "forward" else ""
        self._file.range_(f"layers.{number}{suffix}", int(begin), int(self._host), category=category)

    def _data(self) -> None:
        begin = self._host
        if "dataloader" in self._faults:
            self._drained()
            begin = self._host
            self._host += self._work * self._size
        elif "early data" in self._faults and self._device > self._host:
            self._host += (self._device - self._host) * 0.5
        else:
            self._host += 20 * US
        self._file.range_("data", int(begin), int(self._host), category="data")
        if {"copies", "pinned copies"} & set(self._faults):
            pageable = "copies" in self._faults
            took = self._work * self._size / 2 if pageable else 20 * US
            more = {"table": "MEMCPY", "memory": (0 if pageable else 1, 2), "size": int(took * 10)}
            self._one(took, "copy", **more)
            if pageable:
                self._host = self._device

    def _trouble(self) -> None:
        """Emit the fault between forward and backward."""
        if "sync" in self._faults:
            begin, self._host = self._host, max(self._host, self._device + 5 * US)
            self._file.call("cudaStreamSynchronize_v3020", int(begin), int(self._host))
            self._host += self._work * self._size / 2  # metrics are computed and written
        if "allocation" in self._faults:
            begin, self._host = self._host, max(self._host, self._device)
            self._host += self._work * self._size / 2
            self._file.call("cudaFree_v3020", int(begin), int(self._host))
            self._call("cudaMalloc_v3020", 200 * US)
        if "hidden allocation" in self._faults and self._device > self._host:
            self._call("cudaMalloc_v3020", (self._device - self._host) * 0.3)
        if "loading" in self._faults and self._step % 2:
            self._drained()
            self._host += self._work * self._size
            self._call("cuLibraryLoadData", 40 * US)
        collects = "gc" in self._faults and self._step % 2
        if collects or ("hidden garbage" in self._faults and self._device > self._host):
            if collects:
                self._drained()
            begin = self._host
            self._host += self._work * self._size if collects else (self._device - self._host) * 0.3
            self._file.range_("gc.collect", int(begin), int(self._host), category="user")

    def _backward(self) -> None:
        for number in reversed(range(self._layers)):
            if "recompute" in self._faults:
                self._layer(number, "recompute", 1, "recompute")
            self._layer(number, "backward", 2, "backward")
            if "hidden communication" in self._faults:
                self._one(self._kernel, NCCL, stream=9, after=self._device - self._kernel * self._kernels)

    def _communicate(self) -> None:
        if not {"exposed-collectives", "rank-wait"} & set(self._faults):
            return
        for _ in range(3):
            took = self._work * self._size / 3 if "exposed-collectives" in self._faults else 60 * US
            if "rank-wait" in self._faults and self._draw.random() < 0.6:
                took += self._work * self._size / 2
            end = self._one(took * self._draw.uniform(0.97, 1.03), NCCL, stream=9, after=self._device)
            self._device = end
