"""`LayerProfiler` on two real ranks, under DDP and FSDP2: a folder for each rank, the same results, the same layers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from nvprof_kit import LayerProfiler, handlers

dist.init_process_group("gloo")
rank = dist.get_rank()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.proj(self.norm(x)).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.spatial = nn.ModuleList(Block() for _ in range(2))
        self.temporal = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in (*self.spatial, *self.temporal):
            x = block(x)
        return x

def train(kind, schedule):
    torch.manual_seed(0)
    model = Net()
    mesh = None
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        for block in (*model.spatial, *model.temporal):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    losses = []
    options = dict(folder=kind, mesh=mesh, plots=False)
    with LayerProfiler(model, schedule, **options, on_trace_ready=handlers.tensorboard(kind, mesh)) as profiling:
        for _ in range(4):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            profiling.step()
    print(json.dumps(losses), file=open(f"losses.{kind}.{schedule[0]}.{rank}", "w"))

for kind in ("ddp", "fsdp"):
    for schedule in ("off", "1:3"):
        dist.barrier()
        if rank == 0:
            print(f"== {kind} {schedule}", flush=True)
        dist.barrier()
        train(kind, schedule)
        sys.stdout.flush()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Both ways of training, unprofiled and profiled, by the same two processes: a folder, and what each printed."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "train.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run([*launch, str(program)], cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "LayerProfiler stops" not in done.stderr, done.stderr[-3000:]
    parts = (part.partition("\n") for part in done.stdout.split("== ")[1:])
    return folder, {title: printed for title, _, printed in parts}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(run: tuple[Path, dict[str, str]], kind: str) -> None:
    place, said = run
    printed = said[f"{kind} 1:3"]
    assert said[f"{kind} off"] == ""
    assert printed.count("Own cost") == 1 and "Net · rank 0 · steps 1 to 2" in printed  # rank 0 alone prints
    for rank in (0, 1):
        folder = place / kind / f"rank{rank}_dp{rank}_tp0_pp0"
        left = sorted(path.name for path in folder.glob("[!.]*"))
        assert left[:4] == ["Net_kinds.csv", "Net_layers.csv", f"Net_rank_{rank}.log", "Net_trace.json.gz"]
        assert len(left) == 5 and left[4].endswith(".pt.trace.json.gz")
        rows = pd.read_csv(folder / "Net_layers.csv")
        blocks = rows[rows["kind"].notna()]
        assert blocks["step"].unique().tolist() == [1, 2]
        assert set(blocks["layer"]) == {f"{part}.{number}" for part in ("spatial", "temporal") for number in (0, 1)}
        assert set(blocks["phase"]) == {"forward", "backward"} and (blocks["gpu_ns"] > 0).all()
        on, off = (json.loads((place / f"losses.{kind}.{first}.{rank}").read_text()) for first in "1o")
        assert on == off
