"""Take a snapshot of PyTorch's allocator over three training steps of a tiny transformer, with stacks.

    python snapshot_stacks.py FILE.pickle all|python

With ``all`` the C++ frames are told by what TORCH_SYMBOLIZE_MODE names: fast, dladdr or addr2line. Files are cut to
what follows site-packages, others to their last part.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
from torch import nn


def model_of() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda")


def train(model: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


def short(name: str) -> str:
    inside = name.find("site-packages/")
    return name[inside:] if inside >= 0 else name.rpartition("/")[2]


def main(path: Path, stacks: str) -> None:
    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context="all", stacks=stacks, max_entries=2500)
    train(model_of(), torch.randn(4, 64, 128, device="cuda"))
    snapshot = torch.cuda.memory._snapshot()
    seen: set[int] = set()  # a frame is shared by many stacks
    blocks = (block for segment in snapshot["segments"] for block in (segment, *segment["blocks"]))
    for holder in (*(event for trace in snapshot["device_traces"] for event in trace), *blocks):
        for frame in holder.get("frames", ()):
            if id(frame) not in seen:
                seen.add(id(frame))
                frame["filename"] = short(str(frame["filename"]))
    path.write_bytes(pickle.dumps(snapshot))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
