"""A Llama of 7B shape, cut to some layers, as one writes it by hand: docs/how-to/far-from-limit.md.

python by_hand.py [--attention sdpa] [--norm torch]        with the faults mended: scores that are kept, an RMSNorm of
                                                           five operators in fp32
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import nvprof_kit

parser = argparse.ArgumentParser()
parser.add_argument("--attention", default="written")
parser.add_argument("--norm", default="written")
parser.add_argument("--layers", type=int, default=12)
options = parser.parse_args()
GPU = torch.cuda.is_available()
WIDTH, INNER, HEADS, KV_HEADS, VOCABULARY = (4096, 14336, 32, 8, 32000) if GPU else (64, 160, 4, 2, 100)
BATCH, LENGTH = (2, 2048) if GPU else (2, 32)
HEAD = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        if options.norm == "torch":
            return functional.rms_norm(x, (WIDTH,), self.weight, 1e-6)
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.kv_proj = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k, v = self.kv_proj(x).view(batch, length, 2 * KV_HEADS, HEAD).transpose(1, 2).chunk(2, 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if options.attention == "sdpa":
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
            scores = q @ k.transpose(-2, -1) / HEAD**0.5
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(future, float("-inf")).float().softmax(-1).to(x.dtype)
            out = weights @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, HEADS * HEAD))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(), RMSNorm()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(options.layers))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)).repeat(1, 2).float()
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda" if GPU else "cpu"):
    model = Model()
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(10)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
nvprof_kit.annotate_model(model, optimizer=optimizer)

with nvprof_kit.record(schedule=None) as profiling:
    for tokens in batches:
        with nvprof_kit.step():
            logits = model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        profiling.step()
print("loss", loss.item(), f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if GPU else "")
