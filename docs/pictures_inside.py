"""Takes the pictures of memory.md and timers.md anew, from runs on this machine's CPU; needs chromium and playwright.

python docs/pictures_inside.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from pictures import page, run, save
from torch import nn

from nvprof_kit import MemoryProfiler

TWO_RANKS = """
    import time
    import torch, torch.distributed as dist
    from nvprof_kit import global_timer

    dist.init_process_group("gloo")
    slow = dist.get_rank() == 1
    for _ in range(24):
        with global_timer.stage("step"):
            with global_timer.stage("data"):
                time.sleep(0.012 if slow else 0.004)
            with global_timer.stage("forward"):
                time.sleep(0.008)
            with global_timer.stage("backward"):
                time.sleep(0.012)
                dist.all_reduce(torch.ones(4))
            with global_timer.stage("optimizer"):
                time.sleep(0.004)
"""


def timers_picture(folder: Path) -> None:
    """The timeline of two real ranks, one of which fetches its data slowly."""
    program = folder / "train.py"
    program.write_text(textwrap.dedent(TWO_RANKS))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(program)]
    subprocess.run(launch, check=True, cwd=folder, capture_output=True)
    run(folder, "timers", "time_log", "-o", "timers.png")
    save("timers.png", (folder / "timers.png").read_bytes())


def memory_picture(folder: Path) -> None:
    """The summary of a training step of a small encoder."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(2000, 256), encoder, nn.Linear(256, 2000))
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryProfiler(model, optimizer, folder) as profiler:
        for _ in range(2):
            model(torch.randint(0, 2000, (8, 128))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with page(profiler.folder / "summary_sunburst.html", width=1000) as opened:
        save("memory-sunburst.png", opened.screenshot(full_page=True))


def main() -> None:
    """Take both."""
    with tempfile.TemporaryDirectory() as folder:
        timers_picture(Path(folder))
        memory_picture(Path(folder))


if __name__ == "__main__":
    main()
