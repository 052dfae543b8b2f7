"""`Throughput`: how fast a training loop runs, and how much of it is waiting for data; by the CPU clock alone.

The figures and their names are those of Paddle's profiler: reader cost, batch cost, ips, reader ratio. Nothing waits
for the GPU; over many steps the CPU can be ahead of it by no more than what a stream holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nvprof_kit._instrument.loop.loop import annotate_dataloader
from nvprof_kit._instrument.ranges import state

Batch = TypeVar("Batch")

KEPT = 100_000
"""Steps that the statistics are of: the last so many."""


@dataclass(frozen=True)
class Statistic:
    """A figure over the steps.

    Attributes:
        avg: Its mean; of a rate, the sum of what was done over the sum of the time.
        max: The largest.
        min: The smallest.
        p95: What 95 % of the steps stay at or below.
    """

    avg: float
    max: float
    min: float
    p95: float


@dataclass(frozen=True)
class ThroughputSummary:
    """How fast the loop ran.

    Attributes:
        steps: Steps that count.
        reader_cost: Seconds a step waits for its batch.
        batch_cost: Seconds of a whole step, the waiting among them.
        ips: Samples a second; steps a second where no samples were told.
        tokens: Tokens a second, None where none were told.
        reader_ratio: Waiting over the whole, 0 to 1.
        unit: What `ips` counts: ``samples`` or ``steps``.
    """

    steps: int
    reader_cost: Statistic
    batch_cost: Statistic
    ips: Statistic
    tokens: Statistic | None
    reader_ratio: float
    unit: str

    def __str__(self) -> str:
        """The figures as Paddle's profiler prints them, with p95 and tokens beside."""
        if not self.steps:
            return "Throughput: no step was timed"
        rows = {"reader_cost": self.reader_cost, "batch_cost": self.batch_cost, "ips": self.ips}
        if self.tokens is not None:
            rows["tokens/s"] = self.tokens
        lines = [
            f"Throughput of {self.steps:,} steps. Reader ratio: {100 * self.reader_ratio:.3f} %",
            f"Time unit: s, IPS unit: {self.unit}/s",
            f"| {'':11} | {'avg':>14} | {'max':>14} | {'min':>14} | {'p95':>14} |",
        ]
        for name, figure in rows.items():
            values = (figure.avg, figure.max, figure.min, figure.p95)
            lines.append(f"| {name:11} | " + " | ".join(f"{value:14,.5f}" for value in values) + " |")
        return "\n".join(lines)


class TimedReader(annotate_dataloader[Batch]):
    """A loader of which each fetch is timed; everything else of the loader is reached through it.

    Args:
        loader: What gives the batches.
        meter: What times the fetches.
    """

    def __init__(self, loader: Iterable[Batch], meter: Throughput[Batch]) -> None:
        super().__init__(loader)
        self._meter = meter

    def __iter__(self) -> Iterator[Batch]:
        batches = super().__iter__()
        while True:
            self._meter.begin_read()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._meter.end_read()
            yield batch


class Throughput(Generic[Batch]):
    """Times the steps of a loop.

    ```python
    meter = Throughput(samples=8, tokens=8 * 4096)
    for batch in meter.reader(loader):
        train(batch)
        meter.step()
    print(meter.summary())
    ```

    A step costs about a microsecond. Under ``NVPROF_KIT=off`` nothing is timed.

    Args:
        samples: Samples of a step; `step` may tell each step's own.
        tokens: Tokens of a step, likewise.
        warm_up: First steps that do not count.

    Attributes:
        enabled: Whether anything is timed.
    """

    def __init__(self, samples: int = 0, tokens: int = 0, warm_up: int = 1) -> None:
        self.enabled = state.mode != "off"
        self._samples, self._tokens = samples, tokens
        self._left = warm_up
        self._steps: deque[tuple[int, int, int, int]] = deque(maxlen=KEPT)
        self._began = time.perf_counter_ns()
        self._read = 0
        self._reading = 0

    def reader(self, loader: Iterable[Batch]) -> TimedReader[Batch]:
        """A loader, or any iterable of batches, of which each fetch is timed, and ranged as phase ``data``."""
        return TimedReader(loader, self)

    def begin_read(self) -> None:
        """The step begins to wait for data."""
        self._reading = time.perf_counter_ns()

    def end_read(self) -> None:
        """It has them; without a begin, nothing happens."""
        if self._reading:
            self._read += time.perf_counter_ns() - self._reading
            self._reading = 0

    def step(self, samples: int | None = None, tokens: int | None = None) -> None:
        """A step is over.

        Args:
            samples: Its samples, where they are other than usual.
            tokens: Its tokens, likewise.
        """
        if not self.enabled:
            return
        now = time.perf_counter_ns()
        if self._left > 0:
            self._left -= 1
        else:
            self._steps.append(
                (
                    now - self._began,
                    self._read,
                    self._samples if samples is None else samples,
                    self._tokens if tokens is None else tokens,
                )
            )
        self._began, self._read = now, 0

    def restart(self) -> None:
        """A step begins now: what ran since the last one (validation, a checkpoint) does not count."""
        self._began, self._read = time.perf_counter_ns(), 0

    def leave_out(self, duration_ns: int) -> None:
        """So much of the running step was not the program's, as a profiler that writes its files: it does not count."""
        self._began += duration_ns

    def summary(self, last: int = 0) -> ThroughputSummary:
        """The figures of the steps so far, of the last `KEPT` at most.

        Args:
            last: Only so many last steps; 0 for all.
        """
        steps = list(self._steps)[-last:]
        batch = [one[0] / 1e9 for one in steps]
        read = [one[1] / 1e9 for one in steps]
        samples = [one[2] for one in steps]
        tokens = [one[3] for one in steps]
        told = any(samples)
        return ThroughputSummary(
            steps=len(steps),
            reader_cost=_costs(read),
            batch_cost=_costs(batch),
            ips=_rates(samples if told else [1] * len(steps), batch),
            tokens=_rates(tokens, batch) if any(tokens) else None,
            reader_ratio=sum(read) / sum(batch) if sum(batch) else 0.0,
            unit="samples" if told else "steps",
        )


def _costs(values: Sequence[float]) -> Statistic:
    return _statistic(values, sum(values) / len(values) if values else 0.0)


def _rates(done: Sequence[int], seconds: Sequence[float]) -> Statistic:
    rates = [count / length if length else 0.0 for count, length in zip(done, seconds, strict=True)]
    return _statistic(rates, sum(done) / sum(seconds) if sum(seconds) else 0.0)


def _statistic(values: Sequence[float], avg: float) -> Statistic:
    if not values:
        return Statistic(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Statistic(avg, ordered[-1], ordered[0], ordered[-(-95 * len(ordered) // 100) - 1])
