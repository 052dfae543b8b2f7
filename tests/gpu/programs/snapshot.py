"""Take allocator snapshots of a few training steps with a leak, of one step, and of running out of memory.

    python snapshot.py FOLDER [--width 256] [--layers 4]

Leaves run.pickle, step.pickle, oom_oom.pickle and expected.json: peak and level by PyTorch's own counters, to be found
again by ``nvprof-kit memory``.
"""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path

import torch
from torch import nn

import nvprof_kit


def model_of(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to("cuda")


def train(model: nn.Module, batch: torch.Tensor, steps: int, kept: list[torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for number in range(steps):
        with nvprof_kit.step(number):
            with nvprof_kit.phase("forward"):
                loss = model(batch).square().mean()
            with nvprof_kit.phase("backward"):
                loss.backward()
            with nvprof_kit.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            kept.append(torch.ones(1 << 20, device="cuda") * loss.detach())  # the leak: 4 MiB a step


def without_places(path: Path) -> None:
    """Leave of each file's name in a snapshot what follows this repository or the site-packages."""
    snapshot = pickle.loads(path.read_bytes())
    root = f"{Path(__file__).parents[3]}/"
    seen: set[int] = set()  # a frame is shared by many stacks
    blocks = (block for segment in snapshot["segments"] for block in (segment, *segment["blocks"]))
    for holder in (*(event for trace in snapshot["device_traces"] for event in trace), *blocks):
        for frame in holder.get("frames", ()):
            if id(frame) not in seen:
                seen.add(id(frame))
                name = str(frame["filename"]).removeprefix(root)
                frame["filename"] = name[name.find("site-packages/") :] if "site-packages/" in name else name
    path.write_bytes(pickle.dumps(snapshot))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    with nvprof_kit.memory_snapshot(options.folder / "run.pickle"):
        model = model_of(options.width, options.layers)
        nvprof_kit.annotate_model(model)
        batch = torch.randn(8, 128, options.width, device="cuda")
        kept: list[torch.Tensor] = []
        train(model, batch, 4, kept)
        torch.cuda.synchronize()
        expected = {
            "peak_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"],
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }
    with nvprof_kit.memory_snapshot(options.folder / "step.pickle", at_step=1) as recorded:
        train(model, batch, 3, [])
    expected["written_at_step"] = [path.name for path in recorded.written]
    with nvprof_kit.memory_snapshot(options.folder / "oom.pickle") as recorded, nvprof_kit.phase("too_much"):
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.OutOfMemoryError as error:
            expected["oom"] = type(error).__name__
    expected["written_on_oom"] = [path.name for path in recorded.written]
    for path in options.folder.glob("*.pickle"):
        without_places(path)
    (options.folder / "expected.json").write_text(json.dumps(expected, indent=1))
    print(json.dumps(expected))


if __name__ == "__main__":
    main()
