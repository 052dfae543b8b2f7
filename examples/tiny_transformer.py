"""Train a tiny decoder transformer for a few steps, annotated.

It takes a few seconds on two CPU cores, and runs on a GPU where there is one:

    nvprof-kit record -- python examples/tiny_transformer.py             then: nvprof-kit layers run.json.gz
    nvprof-kit profile -- python examples/tiny_transformer.py       then: nvprof-kit layers run.sqlite

What nvprof_kit needs of a training script is marked; without a profiler attached these lines do nothing.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nvprof_kit  # (1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TinyTransformer(nn.Module):
    def __init__(self, vocabulary: int = 512, width: int = 256, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def counting(batch: int, length: int, vocabulary: int = 512) -> Tensor:
    """Sequences that count upwards from a random start: learnt at once."""
    return (torch.randint(vocabulary, (batch, 1)) + torch.arange(length)) % vocabulary


def train(steps: int, batch: int, length: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TinyTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    nvprof_kit.annotate_model(model)  # (2) the layers
    for number in range(steps):
        with nvprof_kit.step(number):  # (3) the steps, and their phases
            with nvprof_kit.phase("data"):
                tokens = counting(batch, length + 1).to(device)
            with nvprof_kit.phase("forward"):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            with nvprof_kit.phase("backward"):
                loss.backward()
            with nvprof_kit.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        print(f"step {number}  loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    asked = parser.parse_args()
    torch.manual_seed(0)
    train(asked.steps, asked.batch, asked.length)


if __name__ == "__main__":
    main()
