"""`Throughput`: how fast a training loop runs, and how much of the time it waits for data, by the CPU clock.

The figures and their names are those of PaddlePaddle's profiler: reader cost, batch cost, ips, reader ratio. The GPU is
not synchronized; over many steps the CPU is ahead of it by no more than the launch queue.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Generic, TypeVar

from nvprof_kit._instrument import session
from nvprof_kit._instrument.loop.loop import annotate_dataloader
from nvprof_kit.errors import require

Batch = TypeVar("Batch")

KEPT = 100_000
"""Maximum number of steps in the statistics; older steps are dropped."""


@dataclass(frozen=True)
class Statistic:
    """A figure over the steps.

    Attributes:
        avg: Mean; for a rate, total count divided by total time.
        max: Maximum.
        min: Minimum.
        p95: 95th percentile.
    """

    avg: float
    max: float
    min: float
    p95: float


@dataclass(frozen=True)
class ThroughputSummary:
    """How fast the loop ran.

    Attributes:
        steps: Number of steps in the figures.
        reader_cost: Seconds per step spent waiting for the batch.
        batch_cost: Seconds per step, including the wait.
        ips: Samples per second; steps per second if no samples were given.
        tokens: Tokens per second; None if no tokens were given.
        reader_ratio: Waiting time divided by total time, 0 to 1.
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
        """The figures in the format of PaddlePaddle's profiler, with p95 and tokens added."""
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
            lines.append(f"| {name:11} | " + " | ".join(f"{value:14,.5f}" for value in astuple(figure)) + " |")
        return "\n".join(lines)


class TimedReader(annotate_dataloader[Batch]):
    """A data loader with timed fetches; all other attributes are passed through.

    Args:
        loader: The data loader or iterable.
        meter: The meter that times the fetches.
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
    """Measure the throughput of a loop.

    ```python
    meter = Throughput(samples=8, tokens=8 * 4096)
    for batch in meter.reader(loader):
        train(batch)
        meter.step()
    print(meter.summary())
    ```

    The overhead is about a microsecond per step. With ``NVPROF_KIT=off`` nothing is timed.

    Args:
        samples: Samples per step; `step` can override it.
        tokens: Tokens per step; `step` can override it.
        warm_up: Number of first steps to leave out.

    Attributes:
        enabled: Whether steps are timed.
    """

    def __init__(self, samples: int = 0, tokens: int = 0, warm_up: int = 1) -> None:
        self.enabled = session.mode != "off"
        for name, number in (("samples", samples), ("tokens", tokens), ("warm_up", warm_up)):
            require(number, (int, float), f"Throughput: {name}", "a number")
        self._samples, self._tokens = samples, tokens
        self._left = warm_up
        self._steps: deque[tuple[int, int, int, int]] = deque(maxlen=KEPT)
        self._began = time.perf_counter_ns()
        self._read = 0
        self._reading = 0

    def reader(self, loader: Iterable[Batch]) -> TimedReader[Batch]:
        """Wrap a data loader, or any iterable of batches, to time each fetch and range it as phase ``data``."""
        return TimedReader(loader, self)

    def begin_read(self) -> None:
        """Begin waiting for data, if you do not use `reader`."""
        self._reading = time.perf_counter_ns()

    def end_read(self) -> None:
        """End waiting for data; does nothing without `begin_read`."""
        if self._reading:
            self._read += time.perf_counter_ns() - self._reading
            self._reading = 0

    def step(self, samples: int | None = None, tokens: int | None = None) -> None:
        """End the current step and begin the next.

        Args:
            samples: Samples of this step; None for the number given to the constructor.
            tokens: Tokens of this step; None for the number given to the constructor.
        """
        if not self.enabled:
            return
        now = time.perf_counter_ns()
        if self._left > 0:
            self._left -= 1
        else:
            samples = self._samples if samples is None else samples
            tokens = self._tokens if tokens is None else tokens
            self._steps.append((now - self._began, self._read, samples, tokens))
        self._began, self._read = now, 0

    def restart(self) -> None:
        """Begin a step now; time since the last step (validation, a checkpoint) is not counted."""
        self._began, self._read = time.perf_counter_ns(), 0

    def leave_out(self, duration_ns: int) -> None:
        """Exclude some time, such as a profiler's own work, from the current step.

        Args:
            duration_ns: The time to exclude, in ns.
        """
        self._began += duration_ns

    def summary(self, last: int = 0) -> ThroughputSummary:
        """The figures of the last steps, at most 100,000.

        Args:
            last: Number of last steps to include; 0 for all.
        """
        steps = list(self._steps)[-last:]
        lengths, reads, samples, tokens = zip(*steps, strict=True) if steps else ((0,), (0,), (0,), (0,))
        seconds, read_seconds = [length / 1e9 for length in lengths], [read / 1e9 for read in reads]
        total, unit = sum(seconds), "samples" if any(samples) else "steps"

        def rate(amounts: Sequence[int]) -> Statistic:
            rates = [amount / length if length else 0.0 for amount, length in zip(amounts, seconds, strict=True)]
            return _statistic(rates, sum(amounts) / total if total else 0.0)

        return ThroughputSummary(
            steps=len(steps),
            reader_cost=_statistic(read_seconds, fmean(read_seconds)),
            batch_cost=_statistic(seconds, fmean(seconds)),
            ips=rate(samples if unit == "samples" else [1] * len(seconds)),
            tokens=rate(tokens) if any(tokens) else None,
            reader_ratio=sum(read_seconds) / total if total else 0.0,
            unit=unit,
        )


def _statistic(values: Sequence[float], average: float) -> Statistic:
    ordered = sorted(values)
    return Statistic(average, ordered[-1], ordered[0], ordered[math.ceil(0.95 * len(ordered)) - 1])
