"""`LayerProfiler` on a model of two kinds of blocks, held against CUDA events.

    python layer_profiler.py FOLDER [--pairs 4] [--width 2048] [--utilisation]
    torchrun --nproc-per-node 2 layer_profiler.py FOLDER        under DDP

Trains eight blocks, spatial and temporal in turn, bf16, flash attention. Prints the profiler's own output, then each
block's forward by CUDA events in the same steps, and whether results are the same without the profiler. Runs out of
memory inside a window, and says whether the program goes on. Leaves FOLDER/found.rank0.json beside the profile.
"""

import argparse
import json
import os
import statistics
import weakref
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for results that can be compared bit for bit

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nvprof_kit import LayerProfiler, Schedule, Throughput, handlers

HEAD, FRAMES, PIXELS = 128, 16, 1024


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, -1, HEAD).transpose(1, 3).unbind(2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Video(nn.Module):
    """Blocks over the pixels of a frame and blocks over the frames of a pixel, in turn."""

    def __init__(self, width: int, pairs: int) -> None:
        super().__init__()
        self.spatial_blocks = nn.ModuleList(Block(width) for _ in range(pairs))
        self.temporal_blocks = nn.ModuleList(Block(width) for _ in range(pairs))
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            x = temporal(spatial(x).transpose(0, 1).contiguous()).transpose(0, 1).contiguous()
        return self.head(x)


class Run:
    """A model, its optimizer and batches, the same each time."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Video(options.width, options.pairs).to("cuda", torch.bfloat16)
        if dist.is_initialized():
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(FRAMES, PIXELS, options.width, device="cuda", dtype=torch.bfloat16)
        self.losses: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        loss = self.model(self.batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        return loss


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Events:
    """Each block's forward by CUDA events in hooks of its own, call by call."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[str, list[list[torch.cuda.Event]]] = {}
        for name, module in model.named_modules():
            if isinstance(module, Block):
                calls = self._calls.setdefault(name.removeprefix("module."), [])
                module.register_forward_pre_hook(lambda *_call, calls=calls: calls.append([_mark()]))
                module.register_forward_hook(lambda *_call, calls=calls: calls[-1].append(_mark()))

    def ns(self, layer: str, step: int) -> float:
        """How long a block's forward took in a step."""
        begin, end = self._calls[layer][step]
        return float(begin.elapsed_time(end)) * 1e6


def same_results(options: argparse.Namespace) -> dict[str, bool]:
    """Whether losses and weights of six steps are the same bit for bit with a profiler, and in a second run without."""
    torch.use_deterministic_algorithms(True)

    def trained(schedule: str) -> list[torch.Tensor]:
        run = Run(options)
        with LayerProfiler(run.model, schedule, folder=options.folder, name="Same", plots=False, echo=False) as p:
            for _ in range(6):
                run.step()
                p.step()
        return [*run.losses, *(weight.detach() for weight in run.model.parameters())]

    plain, again, recorded = trained("off"), trained("off"), trained("2:4")
    torch.use_deterministic_algorithms(False)
    return {
        "same_results": all(map(torch.equal, plain, recorded)),
        "same_results_without_profiler": all(map(torch.equal, plain, again)),
    }


def survives_out_of_memory(options: argparse.Namespace) -> bool:
    """Whether a window that ends by running out of memory is written, and training goes on."""
    run = Run(options)
    settings = dict(folder=options.folder, name="OutOfMemory", plots=False, echo=False)
    profiling = LayerProfiler(run.model, "1:9", **settings)
    try:
        with profiling:
            for number in range(4):
                run.step()
                if number == 2:
                    torch.empty(1 << 42, device="cuda")
                profiling.step()
    except torch.cuda.OutOfMemoryError:
        run.step()
    return len(run.losses) == 4 and profiling.recorded[0].window.last_step == 1


def profiled(options: argparse.Namespace) -> tuple[Events, LayerProfiler]:
    run = Run(options)
    events = Events(run.model)
    meter = Throughput(samples=FRAMES, tokens=FRAMES * PIXELS)
    settings = dict(folder=options.folder, throughput=meter, utilisation=options.utilisation)
    schedule = Schedule(skip_first=10, warmup=2, active=4)
    ready = handlers.together(handlers.tensorboard(options.folder), handlers.chrome_trace(options.folder))
    with LayerProfiler(run.model, schedule, **settings, on_trace_ready=ready) as profiling:
        for _ in range(16):
            kept = weakref.ref(run.step())
            assert kept() is None, "a tensor is kept alive"
            meter.step()
            profiling.step()
    return events, profiling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--utilisation", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    rank = dist.get_rank() if dist.is_initialized() else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    events, profiling = profiled(options)

    (one,) = profiling.recorded
    rows = one.profile.rows
    forward = rows[(rows["phase"] == "forward") & rows["kind"].notna()]
    ratios = []
    for row in forward.to_dict("records"):
        ours, theirs = row["gpu_ns"] / 1e6, events.ns(row["layer"], row["step"]) / 1e6
        ratios.append(ours / theirs)
        print(f"step {row['step']} {row['layer']:18} forward: kernels {ours:7.3f} ms, between events {theirs:7.3f} ms")
    found = {
        "kernels_over_events": [min(ratios), statistics.median(ratios), max(ratios)],
        **same_results(options),
        "survives_out_of_memory": survives_out_of_memory(options),
    }
    (options.folder / f"found.rank{rank}.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
