"""One Llama-shaped model trained over several GPUs in the ways people do it; one process a GPU, for torchrun.

    torchrun --nproc-per-node 2 parallel.py ddp|fsdp|fsdp-keep|tensor|pipeline [--annotate-first] [--record FOLDER]

``--annotate-first`` annotates before the model is wrapped, so that our hooks and the wrapper's stand the other way.
``--record`` records the steps with PyTorch's profiler instead of leaving them to nsys: FOLDER/KIND.rank0.json.gz.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from train import VOCABULARY, WIDTH, Size, llama
from variants import STEPS, WARM_UP, collected

import nvprof_kit

LAYERS = 4


class Stage(nn.Module):
    """Half of a small decoder: one of two pipeline stages."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if rank == 0 else None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, dropout=0.0) for _ in range(LAYERS // 2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY) if rank == 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(hidden) if self.embed is not None else hidden
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) if self.head is not None else hidden


def wrap(kind: str, model: nn.Module) -> nn.Module:
    device = next(model.parameters()).device
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    if kind in ("fsdp", "fsdp-keep"):
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=kind == "fsdp")
        return fully_shard(model, mesh=mesh, reshard_after_forward=kind == "fsdp")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid = None
    if kind == "grid":
        grid = dist.device_mesh.init_device_mesh(
            device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor")
        )
        mesh = grid["tensor"]
    for block in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        plan |= {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    if grid is not None:
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block, mesh=grid["data"])
        fully_shard(model, mesh=grid["data"])
    return model


def data_parallel(kind: str, annotate_first: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = llama(Size(LAYERS)).to("cuda", torch.bfloat16)
    if annotate_first:
        nvprof_kit.annotate_model(model)
    model = wrap(kind, model)
    if not annotate_first:
        nvprof_kit.annotate_model(model)
    # a foreach step does not take sharded and plain parameters together
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=kind != "tensor")
    nvprof_kit.annotate_optimizer(optimizer)
    tokens = torch.randint(0, VOCABULARY, (4, 513), device="cuda")

    def step() -> None:
        with nvprof_kit.phase("forward"):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])[0]
        with nvprof_kit.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    run(step)


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage_module = Stage(rank).to("cuda", torch.bfloat16)
    nvprof_kit.annotate_model(stage_module, root=f"stage{rank}")
    stage = PipelineStage(stage_module, rank, 2, torch.device("cuda"))
    tokens = torch.randint(0, VOCABULARY, (8, 256), device="cuda")

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)

    def step() -> None:
        with nvprof_kit.phase("pipeline"):
            schedule.step(tokens) if rank == 0 else schedule.step(target=tokens)

    run(step)


def recorded() -> nvprof_kit.record:
    folder = sys.argv[sys.argv.index("--record") + 1]
    return nvprof_kit.record(f"{folder}/{sys.argv[1]}.rank{dist.get_rank()}.json.gz")


def run(step) -> None:
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    with recorded() if "--record" in sys.argv else collected():
        for number in range(STEPS):
            with nvprof_kit.step(number):
                step()


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    pipeline() if sys.argv[1] == "pipeline" else data_parallel(sys.argv[1], "--annotate-first" in sys.argv)
    dist.destroy_process_group()
