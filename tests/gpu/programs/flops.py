"""What `count_flops` counts on a GPU: beside the formula, beside a run that is not counted, in programs of every kind.

python flops.py FOLDER        leaves FOLDER/NAME.flops.json and prints a line for each program
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import train
import triton
import triton.language as tl
from torch import nn

import nvprof_kit

LAYERS, WIDTH, INNER, VOCABULARY, BATCH, LENGTH = 4, 512, 1536, 1000, 2, 256
FORWARD = (
    2 * BATCH * LENGTH * (LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) + WIDTH * VOCABULARY)
    + 4 * BATCH * LENGTH * LENGTH * WIDTH * LAYERS
)
"""Two operations for each weight and token; scores and their sums, two products of LENGTH x LENGTH x WIDTH each."""


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"intermediate_size": INNER, "num_attention_heads": 8}
    return train.llama(LAYERS, WIDTH, VOCABULARY, **sizes).to("cuda", torch.bfloat16)


def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with nvprof_kit.step(0):
        with nvprof_kit.phase("forward"):
            loss = model(input_ids=tokens, labels=tokens)[0]
        with nvprof_kit.phase("backward"):
            loss.backward()
    return torch.cat([loss.detach().flatten()] + [weight.grad.flatten() for weight in model.parameters()])


def count(name: str, folder: Path, model: nn.Module, tokens: torch.Tensor) -> None:
    """Run a step uncounted and the same counted, and print what differs."""
    nvprof_kit.annotate_model(model)
    plain = step(model, tokens)
    model.zero_grad()
    with nvprof_kit.count_flops(folder / f"{name}.flops.json") as counted:
        result = step(model, tokens)
    same = torch.equal(plain, result)
    said = json.loads(counted.written.read_text())
    by_phase: Counter[str] = Counter()
    outside = 0
    for row in said["operators"]:
        place = said["ranges"][row["range"]]
        by_phase[place["phase"]] += row["flops"]
        outside += row["flops"] * (place["layer"] == "(none)")
    ratios = {phase: round(flops / FORWARD, 4) for phase, flops in by_phase.items()}
    names = sorted({row["name"] for row in said["operators"] + said["unknown"]})
    unknown = sum(row["runs"] for row in said["unknown"])
    dtypes = sorted({row["dtype"] for row in said["operators"] if row["flops"]})
    print(f"{name}: of the formula's forward {ratios}, outside layers {outside}, unknown {unknown}, {dtypes}, "
          f"{'same bits' if same else 'OTHER BITS'}, {names}")  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            count(backend.lower(), folder, llama(), tokens)
    for reentrant in (False, True):
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        count(f"checkpoint-{'reentrant' if reentrant else 'not-reentrant'}", folder, model, tokens)
    model = llama()
    for block in model.model.layers:
        block.compile()
    count("compiled-blocks", folder, model, tokens)  # eager meanwhile: the bits may differ from the compiled run's
    count("compiled-model", folder, torch.compile(llama()), tokens)
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        count(f"fp32-{precision}", folder, llama().float(), tokens)
    triton_kernel(folder)


@triton.jit
def add_one(x, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def triton_kernel(folder: Path) -> None:
    """A kernel that PyTorch's dispatcher never sees."""
    values = torch.zeros(1000, device="cuda")
    with nvprof_kit.count_flops(folder / "triton.flops.json") as counted, nvprof_kit.layer_range("block"):
        add_one[(1,)](values, 1000, 1024)
    print(f"triton: {json.loads(counted.written.read_text())['unknown']}, {int(values.sum())}")


if __name__ == "__main__":
    main()
