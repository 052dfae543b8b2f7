"""Train one model for a few steps on a GPU, annotated with nvprof_kit; the capture begins after the warm-up.

python train.py llama|gpt2|encoder [--layers 8] [--steps 2] [--plain]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

import nvprof_kit

VOCABULARY, WIDTH, HEADS = 32000, 1024, 16


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2816,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            use_cache=False,
        )
    )


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=layers, n_head=HEADS, n_positions=1024, use_cache=False)
    )


class Encoder(nn.Module):
    """A plain `nn.TransformerEncoder` with an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self.head(self.encoder(self.embed(input_ids)))
        return (nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()),)


MODELS: dict[str, Callable[[int], nn.Module]] = {"llama": llama, "gpt2": gpt2, "encoder": Encoder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="do not annotate")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = MODELS[options.model](options.layers).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not options.plain:
        nvprof_kit.annotate_model(model)
        nvprof_kit.annotate_optimizer(optimizer)
    tokens = torch.randint(0, VOCABULARY, (4, 513), device="cuda")
    for number in range(options.warm_up + options.steps):
        if number == options.warm_up:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
        with nvprof_kit.step(number):
            with nvprof_kit.phase("data"):
                batch = tokens[torch.randperm(4, device="cuda")]
            with nvprof_kit.phase("forward"):
                loss = model(input_ids=batch[:, :-1], labels=batch[:, 1:])[0]
            with nvprof_kit.phase("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
