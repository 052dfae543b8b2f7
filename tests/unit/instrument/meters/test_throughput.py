"""The throughput meter: by a clock of its own, the figures by hand."""

import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from nvprof_kit import Throughput


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds told by the test."""
    clock = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: round(clock.seconds * 1e9))
    return clock


def loop(meter: Throughput[int], clock: SimpleNamespace, lengths: list[tuple[float, float]]) -> None:
    def loader():
        for number, (read, _) in enumerate(lengths):
            clock.seconds += read
            yield number

    for number in meter.reader(loader()):
        clock.seconds += lengths[number][1]
        meter.step()


def test_the_figures_by_hand(clock):
    meter = Throughput[int](samples=8, tokens=1000)
    loop(meter, clock, [(9.0, 9.0), (1.0, 3.0), (0.5, 1.5), (0.5, 3.5)])  # the first is warm-up
    found = meter.summary()
    assert (found.steps, found.unit) == (3, "samples")
    assert asdict(found.batch_cost) == dict(avg=10 / 3, max=4.0, min=2.0, p95=4.0)
    assert asdict(found.reader_cost) == dict(avg=2 / 3, max=1.0, min=0.5, p95=1.0)
    assert found.reader_ratio == pytest.approx(0.2)  # 2 s of 10
    assert asdict(found.ips) == dict(avg=2.4, max=4.0, min=2.0, p95=4.0)  # 24 samples in 10 s; 8 in 2 s
    assert found.tokens is not None and found.tokens.avg == pytest.approx(300.0)
    assert meter.summary(last=1).batch_cost.avg == 4.0


def test_steps_of_their_own_size_and_what_does_not_count(clock):
    meter = Throughput[int](warm_up=0)
    clock.seconds += 50
    meter.restart()  # the model was set up
    for tokens in (100, 300):
        clock.seconds += 1
        meter.step(tokens=tokens)
    found = meter.summary()
    assert found.unit == "steps" and found.ips.avg == 1.0
    assert found.tokens is not None and (found.tokens.avg, found.tokens.max) == (200.0, 300.0)


def test_it_prints_what_paddle_prints(clock):
    meter = Throughput[int](warm_up=0)
    clock.seconds += 2
    meter.step()
    assert str(meter.summary()).splitlines() == [
        "Throughput of 1 steps. Reader ratio: 0.000 %",
        "Time unit: s, IPS unit: steps/s",
        "|             |            avg |            max |            min |            p95 |",
        "| reader_cost |        0.00000 |        0.00000 |        0.00000 |        0.00000 |",
        "| batch_cost  |        2.00000 |        2.00000 |        2.00000 |        2.00000 |",
        "| ips         |        0.50000 |        0.50000 |        0.50000 |        0.50000 |",
    ]
    assert str(Throughput().summary()) == "Throughput: no step was timed"


def test_a_loader_that_raises_ends_the_reading(clock):
    meter = Throughput[int](warm_up=0)

    def loader():
        yield 1
        clock.seconds += 5
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        for _ in meter.reader(loader()):
            clock.seconds += 1
            meter.step()
    meter.end_read()  # without a begin: nothing
    assert meter.summary().reader_cost.avg == 0.0
