"""A Llama-shaped model trained over several ranks, a fault planted on the last one; one process a rank, for torchrun.

    torchrun --nproc-per-node 2 ranks.py ddp|fsdp|tensor|grid|pipeline|1f1b|interleaved
        [--faults layer,host,loader,none] [--record FOLDER] [--truth FOLDER]

``grid`` is tensor parallel over half of the ranks, and FSDP2 over two such halves. ``pipeline`` runs by GPipe's
schedule, ``1f1b`` by one forward, one backward; in ``interleaved`` each rank has two stages that are not neighbours.

Each fault is a window of its own of six steps, in the order asked for:

- ``layer``: the last rank multiplies more matrices in the forward of one layer's mlp (``late_layer()``)
- ``host``: its Python is busy for 30 ms in the forward of one layer's attention
- ``loader``: its data loader takes 30 ms longer for a batch
- ``none``: nothing is planted

and those of rank_faults.py, each on a rank and in a place of its own, which are also written down as they happen:
``--truth FOLDER``.

nsys collects the windows by cudaProfilerStart and cudaProfilerStop (``--capture-range-end=repeat:4``), so each is a
report. With ``--record`` the embedded recorder writes them instead, FOLDER/KIND-FAULT.rankR.json.gz.
Without a GPU it runs over gloo, on a smaller model.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel import wrap
from rank_faults import PLACES, Faults, plant_all, slow_optimizer
from torch import nn
from train import Size, llama
from variants import collected

import nvprof_kit

CUDA = torch.cuda.is_available()
LAYERS, STEPS, WARM_UP = 4, 6, 3
SIZE = Size(LAYERS, 2048) if CUDA else Size(LAYERS, 128, 500)
BATCH, LENGTH, MICRO_BATCHES = 8, 1024 if CUDA else 16, 4
SCHEDULES = {"pipeline": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
"""The classes of `torch.distributed.pipelining`. Those of one forward, one backward have twice the micro-batches."""

SLOW_MATRIX, SLOW_PRODUCTS = (8192, 8) if CUDA else (512, 8)
SLOW_S = 0.03

planted = {"fault": "none"}
"""The fault of the window that runs."""


def is_planted(fault: str) -> bool:
    return planted["fault"] == fault and dist.get_rank() == dist.get_world_size() - 1


def plant(layer: nn.Module, device: torch.device) -> None:
    """Make the faults possible in this layer: in its mlp's forward and in its attention's."""
    matrix = torch.randn(SLOW_MATRIX, SLOW_MATRIX, device=device, dtype=torch.bfloat16 if CUDA else torch.float32)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        with torch.no_grad():
            for _ in range(SLOW_PRODUCTS if is_planted("layer") else 0):
                torch.mm(matrix, matrix, out=product)

    def be_busy() -> None:
        until = time.perf_counter() + SLOW_S
        while is_planted("host") and time.perf_counter() < until:
            pass

    before(layer.mlp, multiply)
    before(layer.self_attn, be_busy)


def before(module: nn.Module, act: Callable[[], None]) -> None:
    """Act inside the module's forward, where its range is open."""
    forward = module.forward

    def slowed(*args: Any, **kwargs: Any) -> Any:
        act()
        return forward(*args, **kwargs)

    module.forward = slowed


def batches() -> Iterator[torch.Tensor]:
    """Batches of tokens on the CPU, the same on every rank of a tensor or pipeline job."""
    generator = torch.Generator().manual_seed(0)
    while True:
        if is_planted("loader"):
            time.sleep(SLOW_S)
        tokens = torch.randint(0, SIZE.vocabulary, (BATCH, LENGTH + 1), generator=generator)
        yield tokens.pin_memory() if CUDA else tokens


def late_layer(kind: str) -> int:
    """Number of the layer that the faults of layer and host are planted in: of a pipeline, one of the last stage."""
    return LAYERS - 1 if kind in SCHEDULES else LAYERS // 2


class Stage(nn.Module):
    """The part of a Llama that is one of a pipeline's stages; its layers keep their numbers in the whole model."""

    def __init__(self, model: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        inner, layers = model.model, len(model.model.layers)
        mine = range(number * layers // stages, (number + 1) * layers // stages)
        self.embed_tokens = inner.embed_tokens if number == 0 else None
        self.rotary_emb = copy.deepcopy(inner.rotary_emb)  # a rank may have two stages
        self.layers = nn.ModuleDict({str(number): inner.layers[number] for number in mine})
        self.norm = inner.norm if number == stages - 1 else None
        self.lm_head = model.lm_head if number == stages - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.embed_tokens is None else self.embed_tokens(hidden)
        places = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        turns = self.rotary_emb(hidden, position_ids=places)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=turns)
        return hidden if self.norm is None else self.lm_head(self.norm(hidden))


def data_parallel(kind: str, device: torch.device, faults: Faults) -> Callable[[torch.Tensor], None]:
    """A step of DDP, FSDP2 or tensor parallel training."""
    model = llama(SIZE).to(device, torch.bfloat16 if CUDA else torch.float32)
    plant(model.model.layers[late_layer(kind)], device)
    plant_all(dict(model.named_modules()), faults)
    wrapped = wrap(kind, model)
    nvprof_kit.annotate_model(wrapped)
    # a foreach step does not take sharded and plain parameters together
    optimizer = slow_optimizer(torch.optim.AdamW, faults)(
        wrapped.parameters(), lr=1e-4, foreach=kind not in ("tensor", "grid")
    )
    nvprof_kit.annotate_optimizer(optimizer)

    def step(tokens: torch.Tensor) -> None:
        with nvprof_kit.phase("forward"):
            loss = wrapped(input_ids=tokens[:, :-1], labels=tokens[:, 1:])[0]
        with nvprof_kit.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(kind: str, device: torch.device, faults: Faults) -> Callable[[torch.Tensor], None]:
    """A step of a pipeline of as many stages as ranks, or twice as many."""
    import torch.distributed.pipelining as pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = 2 if kind == "interleaved" else 1
    model = llama(Size(each * LAYERS, SIZE.width, SIZE.vocabulary)).to(torch.bfloat16 if CUDA else torch.float32)
    modules = {number: Stage(model, number, each * ranks).to(device) for number in range(rank, each * ranks, ranks)}
    for number, module in modules.items():
        late = str(late_layer(kind))
        if late in module.layers:
            plant(module.layers[late], device)
        plant_all(dict(module.named_modules()), faults)
        nvprof_kit.annotate_model(module, root=f"stage{number}")
    optimizer = torch.optim.AdamW([one for module in modules.values() for one in module.parameters()], lr=1e-4)
    nvprof_kit.annotate_optimizer(optimizer)

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    stages = [pipelining.PipelineStage(module, number, each * ranks, device) for number, module in modules.items()]
    schedule = getattr(pipelining, SCHEDULES[kind])(
        stages if kind == "interleaved" else stages[0],
        n_microbatches=MICRO_BATCHES if kind == "pipeline" else 2 * MICRO_BATCHES,
        loss_fn=loss_of,
    )
    faults.log_messages()

    def step(tokens: torch.Tensor) -> None:
        with nvprof_kit.phase("pipeline"):
            inputs = (tokens[:, :-1].contiguous(),) if rank == 0 else ()
            target = tokens[:, 1:].contiguous() if rank == ranks - 1 else None
            schedule.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("ddp", "fsdp", "tensor", "grid", *SCHEDULES))
    parser.add_argument("--faults", default="layer,host,loader,none")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--truth", type=Path)
    asked = parser.parse_args()

    # several ranks may share a GPU: NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1
    number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count() if CUDA else 0
    device = torch.device("cuda", number) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=device if CUDA else None)
    torch.manual_seed(0)
    faults = Faults(asked.truth, dist.get_rank(), device)
    step = (pipeline if asked.kind in SCHEDULES else data_parallel)(asked.kind, device, faults)
    loader = iter(nvprof_kit.annotate_dataloader(batches()))

    numbers = itertools.count()

    def train(steps: int) -> None:
        for number in itertools.islice(numbers, steps):
            with nvprof_kit.step(number):
                faults.begin_step(number)
                tokens = next(loader)
                if faults.now("copy"):
                    faults.copy(device)
                if faults.now("head"):
                    faults.sleep(0.025)
                step(tokens.to(device, non_blocking=True))

    def window(name: str) -> AbstractContextManager[object]:
        if asked.record is not None:
            return nvprof_kit.record(asked.record / f"{name}.rank{dist.get_rank()}.json.gz")
        return collected() if CUDA else nullcontext()

    train(WARM_UP)
    for fault in asked.faults.split(","):
        planted["fault"] = fault
        faults.fault = fault if fault in PLACES else "none"
        train(1)
        dist.barrier()
        name = f"{asked.kind}-{fault}"
        with window(name):
            train(STEPS)
        faults.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
