"""What it costs to keep one step in a thousand for telemetry.

    python telemetry.py [--device cuda] [--layers 8] [--width 1024] [--period 50] [--windows 3] [--rounds 3]

A training loop without telemetry and with it, in turn: `nvprof_kit.scheduled` records one step in each period and
`nvprof_kit.handlers.prometheus` reads it. Prints what a window costs, and what share that is of a loop that keeps one
step in a thousand; and what a step costs that is not kept. On a CPU these are seconds of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import prometheus_client
import torch
from torch import nn

from nvprof_kit import Schedule, annotate_model, handlers, scheduled, step


def model_of(layers: int, width: int, device: str) -> nn.Module:
    block = nn.TransformerEncoderLayer(width, max(width // 64, 1), 4 * width, batch_first=True)
    return nn.TransformerEncoder(block, layers, enable_nested_tensor=False).to(device)


def steps(model: nn.Module, batch: torch.Tensor, count: int, profiling: Any) -> list[float]:
    """Seconds of each step, the work on the GPU and what the profiler does behind it counted in."""
    optimizer, seconds = torch.optim.AdamW(model.parameters(), lr=1e-6), []
    clock = time.perf_counter if batch.is_cuda else time.process_time  # on a CPU others may be at work
    for number in range(count):
        began = clock()
        with step(number):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if profiling is not None:
            profiling.step()
        if batch.is_cuda:
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return seconds


def measured(options: argparse.Namespace, kept: bool) -> list[float]:
    """Seconds of each step of one loop."""
    model = model_of(options.layers, options.width, options.device)
    batch = torch.randn(options.batch, options.length, options.width, device=options.device)
    schedule = Schedule(wait=options.period - 2, warmup=1, active=1, repeat=0)
    registry = prometheus_client.CollectorRegistry()
    with annotate_model(model), tempfile.TemporaryDirectory() as folder:
        steps(model, batch, 3, None)
        handler = handlers.prometheus(registry)
        file = Path(folder) / "run.json.gz"
        window: Any = scheduled(schedule, file, on_trace_ready=handler) if kept else nullcontext()
        with window as profiling:
            seconds = steps(model, batch, options.windows * options.period, profiling)
    if kept:
        assert registry.get_sample_value("nvprof_kit_window_last_step", {"rank": "0"}) == len(seconds) - 1
    return seconds


def main(device: str = "cuda") -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device)
    sizes = {"layers": 8, "width": 1024, "batch": 8, "length": 512, "period": 50, "windows": 3, "rounds": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    costs, plain, unkept = [], [], []
    for _ in range(options.rounds):
        without, kept = measured(options, False), measured(options, True)
        plain.append(statistics.median(without))
        quiet = [one for number, one in enumerate(kept) if (number + 2) % options.period > 1]
        unkept.append(statistics.median(quiet))
        # the first window starts the profiler's libraries, once for the program: it is told apart
        windows = [sum(kept[at : at + options.period]) - options.period * unkept[-1]
                   for at in range(0, len(kept), options.period)]  # fmt: skip
        costs.append(windows)
    length, window = statistics.median(plain), statistics.median(one for windows in costs for one in windows[1:])
    first = statistics.median(windows[0] for windows in costs)
    print(f"{options.device}, {torch.get_num_threads()} threads: a step {length * 1e3:.2f} ms")
    print(f"a step that is not kept, beside one without telemetry: {(statistics.median(unkept) / length - 1):+.2%}")
    print(f"a window costs {window * 1e3:.0f} ms, the first {first * 1e3:.0f} ms")
    print(f"one step in a thousand: {window / (1000 * length):.3%} of the loop")


if __name__ == "__main__":
    main()
