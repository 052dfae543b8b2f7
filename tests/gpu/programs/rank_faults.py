"""Faults of a rank for ranks.py that differ in kind, each written down when it happens, by the host's clock.

A fault is a function that is called at one place of the loop. What it does and when is appended to
FOLDER/truth.rankR.jsonl: what a reader of the captures must find, known without them. All ranks of a host share
`time.monotonic_ns`, and marks ``clock NANOSECONDS`` tell in a capture where on that clock it is.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import nvprof_kit

CUDA = torch.cuda.is_available()
PLACES = {
    "backward": (0, "model.layers.1.mlp", "backward", "more kernels"),
    "optimizer": (0, "", "optimizer", "more kernels"),
    "copy": (1, "", "data", "copy from pageable memory"),
    "gc": (0, "model.layers.2.self_attn", "forward", "garbage collection, marked"),
    "gc-unmarked": (0, "model.layers.2.self_attn", "forward", "garbage collection, not marked"),
    "sleep": (0, "model.layers.3.mlp", "forward", "host sleeps"),
    "rotating": (-1, "model.layers.1.self_attn", "forward", "host is busy on a rank that changes"),
    "bad-step": (1, "model.layers.3.mlp", "forward", "host sleeps in one step"),
    "first-stage": (0, "layers.0.mlp", "forward", "more kernels in the first stage"),
    "head": (1, "", "forward", "host sleeps outside layers"),
    "none": (-1, "", "", "nothing"),
}
"""Of each fault the rank (-1: told by the step), the layer, the phase, and what is done."""


class Faults:
    """What is planted, and the log of it."""

    def __init__(self, folder: Path | None, rank: int, device: torch.device) -> None:
        self.folder, self.rank = folder, rank
        self.fault, self.step = "none", -1
        size, count = (8192, 8) if CUDA else (256, 4)
        self._count = count
        self._matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if CUDA else torch.float32)
        self._product = torch.empty_like(self._matrix)
        self._pageable = torch.zeros(256 << 20 if CUDA else 1 << 20, dtype=torch.uint8)
        self._timed: list[tuple[dict[str, Any], torch.cuda.Event, torch.cuda.Event]] = []
        self._pending: list[dict[str, Any]] = []
        self._messages: list[dict[str, Any]] = []

    def now(self, *faults: str) -> str:
        """The fault that is planted here on this rank in this step, or ''."""
        if self.fault not in faults:
            return ""
        rank = self.step % 2 if self.fault == "rotating" else PLACES[self.fault][0]
        return self.fault if rank == self.rank else ""

    @contextmanager
    def _logged(self) -> Iterator[None]:
        row = {"rank": self.rank, "fault": self.fault, "step": self.step, "begin_ns": time.monotonic_ns()}
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if CUDA else []
        if CUDA:
            events[0].record()
        yield
        if CUDA:
            events[1].record()
            self._timed.append((row, events[0], events[1]))
        row["end_ns"] = time.monotonic_ns()
        self._pending.append(row)

    def multiply(self) -> None:
        """More kernels on the device."""
        with self._logged(), torch.no_grad():
            for _ in range(self._count):
                torch.mm(self._matrix, self._matrix, out=self._product)

    def sleep(self, seconds: float) -> None:
        """A host that does nothing."""
        with self._logged():
            time.sleep(seconds)

    def busy(self, seconds: float) -> None:
        """A host that is busy with something else."""
        with self._logged():
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass

    def copy(self, device: torch.device) -> None:
        """A copy from memory that is not pinned."""
        with self._logged():
            self._pageable.to(device)

    def collect(self, marked: bool) -> None:
        """Garbage in cycles, and Python's full collection of it."""
        rows: list[Any] = []
        for _ in range(150_000 if CUDA else 20_000):
            one: list[Any] = []
            one.append(one)
            rows.append(one)
        del rows
        with self._logged(), nvprof_kit.phase("gc") if marked else nullcontext():
            gc.collect()

    def begin_step(self, number: int) -> None:
        """The step that begins now; a mark tells the host's clock."""
        self.step = number
        nvprof_kit.mark(f"clock {time.monotonic_ns()}")

    def write(self) -> None:
        """Append what happened to the log."""
        for row, begin, end in self._timed:
            torch.cuda.synchronize()
            row["device_ms"] = begin.elapsed_time(end)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"truth.rank{self.rank}.jsonl").open("a") as log:
                log.writelines(json.dumps(row) + "\n" for row in self._pending)
            with (self.folder / f"messages.rank{self.rank}.jsonl").open("a") as log:
                log.writelines(json.dumps(row) + "\n" for row in self._messages)
        self._timed.clear()
        self._pending.clear()
        self._messages.clear()

    def log_messages(self) -> None:
        """Write down, in FOLDER/messages.rankR.jsonl, what each batch of messages of a pipeline sends and receives, in
        the order of their kernels.
        """
        from torch.distributed.pipelining import schedules

        batch = schedules._batch_p2p

        def logged(ops: list[Any], *args: Any, **kwargs: Any) -> Any:
            passed = [[one.op.__name__, one.peer, one.tensor.nbytes] for one in ops]
            self._messages.append({"fault": self.fault, "step": self.step, "passed": passed})
            return batch(ops, *args, **kwargs)

        schedules._batch_p2p = logged


class _More(torch.autograd.Function):
    """More kernels in the backward of what it stands before."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, faults: Faults) -> torch.Tensor:
        context.faults = faults
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.faults.now("backward"):
            context.faults.multiply()
        return gradient, None


def plant_all(layers: dict[str, Any], faults: Faults) -> None:
    """Make the faults possible in the layers that `PLACES` names; `layers` are those of this rank, by path."""

    def at(path: str, fault: str, act: Any) -> None:
        if path not in layers:
            return
        forward = layers[path].forward

        def slowed(*args: Any, **kwargs: Any) -> Any:
            if faults.now(fault):
                act()
            return forward(*args, **kwargs)

        layers[path].forward = slowed

    at(PLACES["gc"][1], "gc", lambda: faults.collect(True))
    at(PLACES["gc-unmarked"][1], "gc-unmarked", lambda: faults.collect(False))
    at(PLACES["sleep"][1], "sleep", lambda: faults.sleep(0.025))
    at(PLACES["rotating"][1], "rotating", lambda: faults.busy(0.025))
    at(PLACES["first-stage"][1], "first-stage", faults.multiply)

    def once() -> None:
        if faults.step % 6 == 3:
            faults.sleep(0.15)

    at(PLACES["bad-step"][1], "bad-step", once)
    mlp = layers.get(PLACES["backward"][1])
    if mlp is not None:
        inner = mlp.forward
        mlp.forward = lambda hidden, *args, **kwargs: inner(_More.apply(hidden, faults), *args, **kwargs)


def slow_optimizer(kind: type[torch.optim.Optimizer], faults: Faults) -> type[torch.optim.Optimizer]:
    """The class of an optimizer whose step multiplies more matrices."""

    class Slow(kind):  # type: ignore[valid-type, misc]
        def _init_group(self, *args: Any, **kwargs: Any) -> Any:
            if faults.now("optimizer"):
                faults.multiply()
            return super()._init_group(*args, **kwargs)

    return Slow
