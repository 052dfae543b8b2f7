"""Train one model for a few steps on a GPU, annotated with nvprof_kit; the capture begins after the warm-up.

python train.py llama|gpt2|encoder [--layers 8] [--width 1024] [--vocabulary 32000] [--steps 2]
    [--batch 4] [--length 512] [--flops run.flops.json] [--checkpoint]
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

import nvprof_kit

WIDTH, VOCABULARY = 1024, 32_000


def llama(layers: int, width: int = WIDTH, vocabulary: int = VOCABULARY, **sizes: int) -> nn.Module:
    """Heads are 64 wide, and the MLP 2.75 times the width, unless `sizes` of the config say otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"intermediate_size": width * 11 // 4, "num_attention_heads": width // 64, **sizes}
    own = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**own, **sizes, use_cache=False))


def gpt2(layers: int, width: int, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 1024}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


class Encoder(nn.Module):
    """A plain `nn.TransformerEncoder` with an embedding and a head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        sizes = {"d_model": width, "nhead": width // 64, "dim_feedforward": 4 * width, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(**sizes, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self.head(self.encoder(self.embed(input_ids)))
        return (nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()),)


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {"llama": llama, "gpt2": gpt2, "encoder": Encoder}


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
    options = parser.parse_args()
    torch.manual_seed(0)
    model = MODELS[options.model](options.layers, options.width, options.vocabulary).to("cuda", torch.bfloat16)
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    nvprof_kit.annotate_model(model)
    nvprof_kit.annotate_optimizer(optimizer)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.length + 1), device="cuda")
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
