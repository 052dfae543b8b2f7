"""Two real ranks: timers, memory folders, and the verdict on the one that is slow."""

from __future__ import annotations

import csv
import io
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
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


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    subprocess.run([*launch, str(program)], cwd=tmp_path, check=True, capture_output=True, timeout=240)
    assert sorted(path.name for path in (tmp_path / "time_log").iterdir()) == ["timer_rank0.log", "timer_rank1.log"]
    folders = sorted(path.name for path in (tmp_path / "memory_trace").iterdir())
    assert folders == ["rank0_dp0_tp0_pp0", "rank1_dp1_tp0_pp0"]
    assert sorted(path.name for path in (tmp_path / "memory_trace" / folders[1]).glob("[!.]*")) == [
        "memory.csv",
        "memory.log",
    ]

    read = [sys.executable, "-m", "nvprof_kit", "timers", "time_log"]
    told = subprocess.run(read, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "Straggler: critical. Rank 1 is the straggler: it waits least in backward" in told
    assert "forward takes longer there" in told
    table = subprocess.run([*read, "--by", "rank", "--format", "csv"], cwd=tmp_path, check=True, capture_output=True)
    rows = list(csv.DictReader(io.StringIO(table.stdout.decode())))
    assert {(row["stage"], row["rank"], row["calls"]) for row in rows} == {
        (stage, rank, "25") for stage in ("step", "forward", "backward", "optimizer") for rank in "01"
    }
