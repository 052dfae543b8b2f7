"""Two real processes over gloo, recorded by the embedded recorder on CPUs: gloo's collectives are matched."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nvprof_kit import open_job

PROGRAM = """
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
def test_two_ranks_on_cpus(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    (tmp_path / "train.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    done = subprocess.run([*launch, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    traces = sorted(tmp_path.glob("run.rank*.json.gz"))
    assert len(traces) == 2
    job = open_job(tmp_path, workers=1)
    assert job.ranks["rank"].tolist() == [0, 1] and set(job.ranks["world_size"]) == {2}
    answer = job.answer()
    assert answer.steps == 3 and answer.collectives >= 3  # an all-reduce of each step's gradients
    assert answer.charges["wait_ns"].sum() == answer.total_wait_ns
    assert "2 ranks" in str(answer)
