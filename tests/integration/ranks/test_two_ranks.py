"""Two real processes over gloo on CPUs: recorded, timed, and profiled under DDP and FSDP2."""

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from support.cli import NVPROF_KIT, execute, torchrun

from nvprof_kit import open_job

RECORDED = """
import torch, torch.distributed as dist
import nvprof_kit
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
nvprof_kit.annotate_model(model)
with nvprof_kit.record(f"run.rank{rank}.json.gz"):
    for number in range(3):
        with nvprof_kit.step(number):
            model(torch.ones(4, 8)).square().mean().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_collectives_of_the_recorder_are_matched(tmp_path):
    (tmp_path / "train.py").write_text(RECORDED)
    torchrun(2, "train.py", cwd=tmp_path)
    traces = sorted(tmp_path.glob("run.rank*.json.gz"))
    assert len(traces) == 2
    job = open_job(tmp_path)
    assert job.ranks["rank"].tolist() == [0, 1] and set(job.ranks["world_size"]) == {2}
    answer = job.answer()
    assert answer.steps == 3 and answer.collectives >= 3  # an all-reduce of each step's gradients
    assert answer.charges["wait_ns"].sum() == answer.total_wait_ns
    assert "2 ranks" in str(answer)


MEASURED = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from nvprof_kit import MemoryProfiler, global_timer

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(4, 8)

def step():
    with global_timer.stage("step"):
        with global_timer.stage("forward"):
            time.sleep(0.06 if rank == 1 else 0.01)
            loss = model(batch).square().mean()
        with global_timer.stage("backward"):
            loss.backward()
        with global_timer.stage("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

with MemoryProfiler(model, optimizer, pages=False):
    step()
for _ in range(24):
    step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_timers_and_memory_have_a_folder_each_and_the_slow_rank_is_told(tmp_path):
    (tmp_path / "train.py").write_text(MEASURED)
    torchrun(2, "train.py", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "time_log").iterdir()) == ["timer_rank0.log", "timer_rank1.log"]
    folders = sorted(path.name for path in (tmp_path / "memory_trace").iterdir())
    assert folders == ["rank0_dp0_tp0_pp0", "rank1_dp1_tp0_pp0"]
    files = sorted((tmp_path / "memory_trace" / folders[1]).glob("[!.]*"))
    assert [path.name for path in files] == ["memory.csv", "memory.log"]

    told = execute(*NVPROF_KIT, "timers", "time_log", cwd=tmp_path, check=True).stdout
    assert "Straggler: critical. Rank 1 is the straggler: it waits least in backward" in told
    assert "forward takes longer there" in told
    by_rank = [*NVPROF_KIT, "timers", "time_log", "--by", "rank", "--format", "csv"]
    rows = list(csv.DictReader(io.StringIO(execute(*by_rank, cwd=tmp_path, check=True).stdout)))
    assert {(row["stage"], row["rank"], row["calls"]) for row in rows} == {
        (stage, rank, "25") for stage in ("step", "forward", "backward", "optimizer") for rank in "01"
    }


PROFILED = """
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


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Both ways of training, unprofiled and profiled, by the same two processes: a folder, and what each printed."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(PROFILED)
    done = torchrun(2, "train.py", cwd=folder)
    assert "LayerProfiler stops" not in done.stderr, done.stderr[-3000:]
    parts = (part.partition("\n") for part in done.stdout.split("== ")[1:])
    return folder, {title: printed for title, _, printed in parts}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_is_profiled(profiled, kind):
    place, said = profiled
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
