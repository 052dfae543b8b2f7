"""Layers whose tensors are larger than the L2, for `tests/bench/limits_beside_ncu.py`.

python limits.py COUNTS.json        counts step 1 and leaves step 2 between cudaProfilerStart and Stop
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import nvprof_kit

GPU = torch.cuda.is_available()
WIDTH, BATCH, LENGTH, VOCABULARY = (4096, 8, 2048, 32000) if GPU else (64, 2, 32, 100)
HEADS = 32 if GPU else 4


class Program(nn.Module):
    """Two blocks of a Llama of 7B shape, and the layers that PyTorch has a kernel each for."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=11008 if GPU else 160,
                num_hidden_layers=2,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS // 4,
                use_cache=False,
            )
        )
        self.plain = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.RMSNorm(WIDTH),
            nn.Softmax(-1),
            nn.SiLU(),
        )
        self.groups = nn.GroupNorm(8, LENGTH)
        self.thin = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False))  # as in LoRA
        self.few_rows = nn.Linear(WIDTH, VOCABULARY, bias=False)  # as in decoding

    def forward(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        results = self.plain(values), self.groups(values), self.thin(values), self.few_rows(values[:, :8])
        return self.llama(input_ids=tokens, labels=tokens).loss + sum(result.float().mean() for result in results)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if GPU else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Program()
        tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
        values = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    nvprof_kit.annotate_model(model, depth="leaf")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    nvprof_kit.annotate_optimizer(optimizer)
    with nvprof_kit.count_flops(sys.argv[1], at_step=1):
        for number in range(3):
            if number == 2 and GPU:
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
            with nvprof_kit.step(number):
                with nvprof_kit.phase("forward"):
                    loss = model(tokens, values)
                with nvprof_kit.phase("backward"):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
