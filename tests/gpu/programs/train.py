"""Train one model for a few steps on a GPU, annotated with nvprof_kit; the capture begins after the warm-up.

python train.py llama|gpt2|encoder [--layers 8] [--width 1024] [--vocabulary 32000] [--steps 2]
    [--batch 4] [--length 512] [--flops run.flops.json] [--checkpoint]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

import nvprof_kit

WIDTH, HEAD_WIDTH, VOCABULARY = 1024, 64, 32_000


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    layers: int
    width: int = WIDTH
    vocabulary: int = VOCABULARY

    @property
    def heads(self) -> int:
        return self.width // HEAD_WIDTH


def llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.width * 11 // 4,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            use_cache=False,
        )
    )


def gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.vocabulary,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            n_positions=1024,
            use_cache=False,
        )
    )


class Encoder(nn.Module):
    """A plain `nn.TransformerEncoder` with an embedding and a head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.embed = nn.Embedding(size.vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, size.heads, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, size.vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self.head(self.encoder(self.embed(input_ids)))
        return (nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()),)


MODELS: dict[str, Callable[[Size], nn.Module]] = {"llama": llama, "gpt2": gpt2, "encoder": Encoder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--flops", metavar="FILE", help="count the operations of the first step into FILE")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--plain", action="store_true", help="do not annotate")
    options = parser.parse_args()
    torch.manual_seed(0)
    size = Size(options.layers, options.width, options.vocabulary)
    model = MODELS[options.model](size).to("cuda", torch.bfloat16)
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not options.plain:
        nvprof_kit.annotate_model(model)
        nvprof_kit.annotate_optimizer(optimizer)
    tokens = torch.randint(0, size.vocabulary, (options.batch, options.length + 1), device="cuda")
    for number in range(options.warm_up + options.steps):
        if number == options.warm_up:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
        counting = nvprof_kit.count_flops(options.flops) if options.flops and not number else nullcontext()
        with counting, nvprof_kit.step(number):
            with nvprof_kit.phase("data"):
                batch = tokens[torch.randperm(options.batch, device="cuda")]
            with nvprof_kit.phase("forward"):
                loss = model(input_ids=batch[:, :-1], labels=batch[:, 1:])[0]
            with nvprof_kit.phase("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    print(f"loss {loss.item():.4f}, {torch.cuda.max_memory_reserved() / 1e9:.2f} GB held on the GPU")


if __name__ == "__main__":
    main()
