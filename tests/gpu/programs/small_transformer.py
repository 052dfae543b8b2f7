"""The transformer of `faults.py`: a decoder, an encoder or a ViT; what is done wrong stands beside what is right."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HEAD = 128  # the width of a head
NOW = SimpleNamespace(device="cuda", is_toy=False, base="", fault="", is_met=False)  # what this process runs


class Size(NamedTuple):
    width: int
    layers: int
    batch: int
    length: int
    kind: str = "decoder"  # encoder: an embedding of a text; vit: classes of an image
    vocabulary: int = 32_000
    experts: int = 0


def planted(fault: str) -> bool:
    """Whether this process runs the program with that fault."""
    if fault == NOW.fault:
        NOW.is_met = True
        return True
    return False


@dataclass
class Cache:
    kv: Tensor  # (layer, 2, sequence, head, position, HEAD)
    at: int | Tensor  # where the next token goes: common to all sequences, or of each
    sequences: Tensor

    def mask(self) -> Tensor | None:
        if isinstance(self.at, int):
            return None
        future = torch.arange(self.kv.shape[-2], device=self.kv.device) > self.at[:, None, None, None]
        return torch.zeros_like(future, dtype=self.kv.dtype).masked_fill_(future, -torch.inf)

    def extend(self, layer: int, *new: Tensor) -> list[Tensor]:
        """The keys and values of a layer, after these were put behind them."""
        extended = []
        for past, tokens in zip(self.kv[layer], new, strict=True):
            if isinstance(self.at, Tensor):
                past[self.sequences, :, self.at] = tokens[:, :, 0]
                extended.append(past)
            else:
                end = self.at + tokens.shape[2]
                past[:, :, self.at : end] = tokens
                is_copied = planted("cat-cache")
                extended.append(torch.cat([past[:, :, : self.at], tokens], 2) if is_copied else past[:, :, :end])
        return extended


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, size: Size, layer: int) -> None:
        super().__init__()
        self.layer, self.is_causal = layer, size.kind == "decoder"
        self.is_by_hand = planted("math-attention") or (layer == size.layers // 2 and planted("eager-attention-block"))
        self.qkv, self.out = linear(size.width, 3 * size.width), linear(size.width, size.width)

    def forward(self, x: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).transpose(1, 3).unbind(2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        is_causal = self.is_causal and mask is None and q.shape[2] == k.shape[2]
        if planted("mask-in-layer"):
            mask, is_causal = torch.full(2 * q.shape[2:3], -torch.inf, device=q.device, dtype=q.dtype).triu(1), False
        if self.is_by_hand:
            future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.mT * HEAD**-0.5).masked_fill(future, -torch.inf)
            values = scores.float().softmax(-1).to(v.dtype) @ v
        else:
            values = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        return self.out(values.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.is_by_hand = NOW.base == "compile" or planted("hand-gelu")  # the compiler makes one kernel of it

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.is_by_hand:
            x = 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        else:
            x = F.gelu(x, approximate="tanh")
        return self.down(x)


class Experts(nn.Module):
    """Each expert takes the tokens that want it most, all of them equally many."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = linear(size.width, size.experts)
        self.up = nn.Parameter(0.02 * torch.randn(size.experts, size.width, 2 * size.width))
        self.down = nn.Parameter(0.02 * torch.randn(size.experts, 2 * size.width, size.width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, token = self.router(tokens).softmax(-1).T.topk(2 * len(tokens) // len(self.up))
        if not planted("expert-loop"):
            values = torch.bmm(F.silu(torch.bmm(tokens[token], self.up)), self.down) * weight[..., None]
            return torch.zeros_like(tokens).index_add(0, token.flatten(), values.flatten(0, 1)).view_as(x)
        total = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows = (weight[expert] > 0).nonzero()[:, 0]  # the host asks how many there are
            values = F.silu(tokens[token[expert, rows]] @ self.up[expert]) @ self.down[expert]
            total = total.index_add(0, token[expert, rows], values * weight[expert, rows, None])
        return total.view_as(x)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, linear(base.in_features, 16), linear(16, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attn, self.mlp = Attention(size, layer), Experts(size) if size.experts else Mlp(size.width)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        dtype, x = x.dtype, x.to(self.attn_norm.weight.dtype)
        if planted("channel-copies"):  # to channels first and back
            x = x.mT.contiguous().mT.contiguous()
        if planted("tf32-off"):
            torch.set_float32_matmul_precision("highest")
        x = x + self.attn(self.attn_norm(x), cache, mask)
        if planted("tf32-off"):
            torch.set_float32_matmul_precision("high")
        if planted("clamp-check") and x.isinf().any():  # as where fp16 once overflowed
            x = x.clamp(-65_000, 65_000)
        return (x + self.mlp(self.mlp_norm(x))).to(dtype)


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.kind, width = size.kind, size.width
        self.embed = linear(768, width) if size.kind == "vit" else nn.Embedding(size.vocabulary, width)
        self.positions = nn.Parameter(torch.randn(size.length, width))
        self.blocks = nn.ModuleList(Block(size, layer) for layer in range(size.layers))
        self.norm, self.head = nn.RMSNorm(width), linear(width, size.vocabulary)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, mask: Tensor | None = None, is_last: bool = False
    ) -> Tensor:
        x = self.embed(tokens.to(self.embed.weight.device)).to(self.positions.device)
        at = 0 if cache is None else cache.at
        x = x + (self.positions[at : at + x.shape[1]] if isinstance(at, int) else self.positions[at][:, None])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if planted("recompute-all") else block(x, cache, mask)
        x = self.norm(x)
        if self.kind == "encoder":
            return F.normalize(x.mean(1), dim=-1)
        x = x.mean(1) if self.kind == "vit" else x[:, -1:] if is_last and not planted("all-logits") else x
        with torch.autocast(x.device.type, enabled=False) if planted("fp32-head") else nullcontext():
            logits = self.head(x.float() if planted("fp32-head") else x)
        return logits[:, -1:] if is_last else logits
