"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only chat,encoder+spectra-on-the-host] [--pairs 7]
    python tests/gpu/programs/faults.py --out FOLDER2 --ranks 2
    python tests/gpu/programs/faults.py --device cpu --toy
    python tests/bench/bench_advise.py --faults FOLDER FOLDER2

The first needs a GPU and nsys, and leaves BASE.sqlite.xz, BASE+FAULT.sqlite.xz and meta.jsonl, which the last reads.
What FOLDER has is not run again; after the seconds no other base begins. The second runs `ddp` and `fsdp` on two GPUs.
The third checks, at sizes that say nothing of speed, that each program computes with a fault what it does without.
One process times the programs of a base, with and without a fault, in turn. Then each is captured in a process of its
own, which also times the steps just before and after those that nsys captures: `near_ms`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import lzma
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("eleventh\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("encoder",)  # annotated by annotate_model alone
NOW = argparse.Namespace(device="cuda", dtype=None, is_toy=False, base="", fault="", is_met=False)  # what runs now
checkpointed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def planted(fault: str) -> bool:
    """Whether the program that runs has that fault."""
    NOW.is_met |= fault == NOW.fault
    return fault == NOW.fault


def toy(small: int, real: int) -> int:
    return small if NOW.is_toy else real


def pinned(values: Tensor) -> Tensor:
    return values.pin_memory() if NOW.device == "cuda" else values


def tokens(batch: int, length: int, words: int = 32_000) -> Tensor:
    return torch.randint(min(words, toy(128, words)), (batch, length), device=NOW.device)


def everywhere(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    is_gqa = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=is_gqa)
    return attended.transpose(1, 2).flatten(2)


causal, gelu = partial(everywhere, is_causal=True), partial(F.gelu, approximate="tanh")


class Attention(nn.Module):
    def __init__(self, width: int, size: int, kv_heads: int):
        super().__init__()
        self.size, self.parts = size, [width, *[kv_heads * size or width] * 2]
        self.qkv = nn.Linear(width, sum(self.parts), bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, core: Any) -> Tensor:
        parts = self.qkv(x).split(self.parts, -1)
        return self.out(core(*(part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Experts(nn.Module):  # each takes the tokens that suit it most
    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, toy(4, 16), bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(toy(4, 16), width, width) * width**-0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        shares = self.router(flat).float().softmax(-1).T
        weights, chosen = shares.topk(2 * len(flat) // len(shares))
        if not planted("loop-over-experts"):
            y = gelu(flat.index_select(0, chosen.flatten()).unflatten(0, chosen.shape) @ self.up) @ self.down
            out.index_add_(0, chosen.flatten(), (y * weights.unsqueeze(2).to(y.dtype)).flatten(0, 1))
            return out.view_as(x)
        is_chosen = torch.zeros_like(shares, dtype=torch.bool).scatter(1, chosen, True)
        for mask, share, up, down in zip(is_chosen, shares, self.up.unbind(), self.down.unbind(), strict=True):
            rows = mask.nonzero().squeeze(1)
            y = gelu(flat.index_select(0, rows) @ up) @ down
            out.index_add_(0, rows, y * share.index_select(0, rows).unsqueeze(1).to(y.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, norm: Any):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(width), attention, norm(width), mlp

    def forward(self, x: Tensor, core: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), core)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Of tokens, or of what a module embeds, to logits or to what another module makes of the last layer's."""

    def __init__(self, width: int, layers: int, embed: Any, head: Any, size: Any = None, **options: Any):
        super().__init__()
        size, mlp, norm, kv_heads = size or toy(16, 128), *map(options.get, ("mlp", "norm", "kv_heads"))
        self.embed = nn.Embedding(toy(128, embed), width) if isinstance(embed, int) else embed
        self.places = nn.Embedding(toy(32, 8192), width)
        parts = ((Attention(width, size, kv_heads or 0), (mlp or MLP)(width)) for _ in range(layers))
        self.layers = nn.ModuleList(Block(width, *part, norm or nn.LayerNorm) for part in parts)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, toy(128, head), bias=False) if isinstance(head, int) else head
        self.cores, self.call = [causal] * layers, lambda layer, *args: layer(*args)
        self.to(NOW.device, NOW.dtype)

    def begin(self, x: Tensor, start: int = 0) -> Tensor:
        return self.embed(x) + self.places.weight[start : start + x.shape[1]]

    def forward(self, x: Tensor, rows: slice = slice(None), start: int = 0) -> Tensor:
        x = self.begin(x, start)
        for layer, core in zip(self.layers, self.cores, strict=True):
            x = self.call(layer, x, core)
        return self.head(self.norm(x[:, rows]))


def decoder(width: int, layers: int, words: int = 32_000, **options: Any) -> Transformer:
    with torch.device(NOW.device):
        return Transformer(toy(64, width), toy(4, layers), words, words, **options)


def turned(rotary: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with rotary embeddings, whose cosines and sines are given."""

    def turn(x: Tensor) -> Tensor:
        (first, second), (cos, sin) = x.chunk(2, -1), rotary
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return causal(turn(q), turn(k), v)


def angles(places: Tensor, size: int) -> Tensor:
    speeds = 1e4 ** -torch.linspace(0, 1, size // 2, device=NOW.device)
    turns = places.unsqueeze(1) * speeds
    return torch.stack([turns.cos(), turns.sin()]).to(NOW.dtype)


class Dora(nn.Module):
    """A linear layer with an adapter of low rank and a magnitude of each output, which can be merged."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, rank = base, toy(4, 64)
        self.a = nn.Parameter(torch.randn(rank, base.in_features).to(base.weight) * 0.02)
        self.b = nn.Parameter(torch.randn(base.out_features, rank).to(base.weight) * 0.02)
        self.magnitude = nn.Parameter(base.weight.norm(dim=1))

    def scales(self) -> Tensor:
        return self.magnitude / (self.base.weight + self.b @ self.a).norm(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + F.linear(F.linear(x, self.a), self.b)) * self.scales()

    def merged(self) -> nn.Linear:
        self.base.weight.data = (self.base.weight + self.b @ self.a) * self.scales().unsqueeze(1)
        return self.base


def prune(mlp: MLP, used: int) -> None:
    """Leaves the first of the middle units, and zeros up to a multiple of 64 of them, which change nothing."""
    width = used if planted("pruned-to-an-odd-width") else -(-used // 64) * 64
    up, down = mlp.up.weight.detach()[:width].clone(), mlp.down.weight.detach()[:, :width].clone()
    up[used:], down[:, used:] = 0, 0
    mlp.up.weight, mlp.down.weight = nn.Parameter(up), nn.Parameter(down)


def chat() -> Iterator[Tensor]:
    """Long prompts through a tuned and pruned decoder; the next token of each is wanted."""
    batch, length = toy(2, 4), toy(8, 2048)
    model = decoder(4096, 8, 65_536, kv_heads=toy(2, 8))
    for layer in model.layers[: toy(2, 6)]:
        for module, name in ((layer.attention, "qkv"), (layer.mlp, "up"), (layer.mlp, "down")):
            dora = Dora(getattr(module, name))
            setattr(module, name, dora if planted("adapters-not-merged") else dora.merged())
    for layer in model.layers[toy(2, 6) :]:
        prune(layer.mlp, toy(201, 14_001))
    nvprof_kit.annotate_model(model)
    rotary = angles(torch.arange(length, device=NOW.device), toy(16, 128))
    model.cores = [partial(turned, rotary)] * len(model.layers)
    prompts = tokens(batch, length)
    while True:
        yield model(prompts, slice(-1, None))


class Drafter(nn.Module):
    """Guesses some tokens at once from the last hidden state, by a head of its own for each, as Medusa does."""

    def __init__(self, width: int, guesses: int):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width // 4, bias=False) for _ in range(guesses))
        self.out = nn.Linear(width // 4, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if planted("weights-broadcast-over-the-batch"):
            weights = [head.weight.expand(len(hidden), -1, -1) for head in self.heads]
            states = [torch.bmm(weight, hidden.unsqueeze(2)).squeeze(2) for weight in weights]
        else:
            states = [head(hidden) for head in self.heads]
        return hidden.unsqueeze(1) + self.out(F.silu(torch.stack(states, 1)))


def verified(cache: list[Tensor], scale: Tensor, q: Tensor, *new: Tensor) -> Tensor:
    """Attention of the guesses, which are in the last places of the cache, to all of it."""
    for old, last in zip(cache, new, strict=True):
        values = (last / scale).round().clamp(-127, 127)
        old[:, :, -last.shape[2] :] = values if planted("quantised-cache") else values * scale
    k, v = (old.to(q.dtype) * scale for old in cache) if planted("quantised-cache") else cache
    return everywhere(q, k, v)


def speculate() -> Iterator[Tensor]:
    """Speculative decoding of many requests: a graph guesses tokens and verifies them, with a static cache."""
    batch, length, guesses = toy(2, 128), toy(8, 1024), toy(2, 8)
    model = decoder(5120, 11, kv_heads=toy(2, 8))
    model.drafter = Drafter(toy(64, 5120), guesses).to(NOW.device, NOW.dtype)
    nvprof_kit.annotate_model(model)
    scale = torch.tensor(1 / 32, device=NOW.device, dtype=NOW.dtype)
    shape = (2, batch, toy(2, 8), length, toy(16, 128))
    for number in range(len(model.layers)):
        cache = torch.randint(-90, 91, shape, device=NOW.device, dtype=torch.int8)
        cache = cache if planted("quantised-cache") else cache.to(NOW.dtype) * scale
        model.cores[number] = partial(verified, [*cache], scale)
    state = torch.randn(batch, toy(64, 5120), device=NOW.device, dtype=NOW.dtype)

    def guess_and_verify() -> Tensor:
        ids = model.head(model.drafter(state)).argmax(-1)
        return model(ids, start=length - guesses)

    def capture(pool: Any = None) -> tuple[Any, Tensor]:
        graph = torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            graph.capture_begin(pool, "thread_local")
            logits = guess_and_verify()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(aside)
        return graph, logits

    aside = torch.cuda.Stream() if NOW.device == "cuda" else None
    guess_and_verify()
    graph, logits = capture() if NOW.device == "cuda" else (None, guess_and_verify())
    while True:
        if planted("captured-each-step") and graph is not None:  # the requests may have changed
            graph, logits = capture(graph.pool())
        if graph is not None:
            graph.replay()
        else:
            logits = guess_and_verify()
        assert min(logits[:, 0].argmax(-1).tolist()) >= 0
        yield logits


def caches_of(model: Transformer, batch: int, length: int) -> list[list[Tensor]]:
    shape = (2, batch, toy(2, 8), length, toy(16, 128))
    return [[*torch.randn(shape, device=NOW.device, dtype=NOW.dtype)] for _ in model.layers]


class ServedExperts(Experts):
    """Experts whose weights are stored as those of linear layers are."""

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        shares = self.router(flat).float().softmax(-1).T
        weights, chosen = shares.topk(2 * len(flat) // len(shares))
        up, down = self.up.mT, self.down.mT
        if planted("experts-relaid-in-each-step"):
            up, down = up.contiguous(), down.contiguous()
        y = gelu(flat.index_select(0, chosen.flatten()).unflatten(0, chosen.shape) @ up) @ down
        out.index_add_(0, chosen.flatten(), (y * weights.unsqueeze(2).to(y.dtype)).flatten(0, 1))
        return out.view_as(x)


class ManyAdapters(nn.Module):
    """A linear layer with an adapter for each of four groups of requests, the first of which has the prompt too."""

    def __init__(self, base: nn.Linear, requests: int):
        super().__init__()
        self.base, self.requests = base, requests
        shapes = (4, 8, base.in_features), (4, base.out_features, 8)
        self.a, self.b = (nn.Parameter(torch.randn(shape).to(base.weight) * 0.05) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        chunk = x.shape[1] - self.requests
        if planted("adapters-gathered-for-each-token"):
            groups = torch.arange(self.requests, device=x.device) // (self.requests // 4)
            groups = F.pad(groups, (chunk, 0))
            low = torch.bmm(self.a[groups], x[0].unsqueeze(2))
            return self.base(x) + torch.bmm(self.b[groups], low).squeeze(2)
        first, others = x[0].split([chunk, self.requests])
        first = F.linear(F.linear(first, self.a[0]), self.b[0])
        others = others.unflatten(0, (4, -1)) @ self.a.mT @ self.b.mT
        return self.base(x) + torch.cat([first, others.flatten(0, 1)])


class Prefixes:
    """Blocks of texts that the cache may have, found by the hash of a block and of all before it."""

    def __init__(self, texts: list[list[int]]):
        self.blocks = [[tuple(text[i : i + 16]) for i in range(0, len(text), 16)] for text in texts]
        self.chains = [self.chain(blocks) for blocks in self.blocks]
        self.known = {chain[-1] for chain in self.chains}

    def chain(self, blocks: list[tuple[int, ...]], before: bytes = b"") -> list[bytes]:
        hashes = [before]
        for block in blocks:
            hashes.append(hashlib.sha256(pickle.dumps((hashes[-1], block))).digest())
        return hashes[1:]

    def found(self) -> int:
        if planted("prefixes-hashed-again"):
            last = [self.chain(blocks)[-1] for blocks in self.blocks]
        else:
            pairs = zip(self.blocks, self.chains, strict=True)
            last = [self.chain(blocks[-1:], b"".join(chain[-2:-1]))[-1] for blocks, chain in pairs]
        return sum(text in self.known for text in last)


def batcher() -> Iterator[Tensor]:
    """An engine's step of a mixture of experts: a part of a long prompt, and one token of each other request."""
    chunk, requests, length = toy(8, 7936), toy(4, 256), toy(8, 512)
    model = decoder(4096, 5, 65_536, kv_heads=toy(2, 8), mlp=ServedExperts)
    for layer in model.layers:
        layer.attention.out = ManyAdapters(layer.attention.out, requests)
    nvprof_kit.annotate_model(model)
    prompt, generated = tokens(1, chunk), torch.ones(1, requests, dtype=torch.int64, device=NOW.device)
    prefixes = Prefixes(np.random.default_rng(0).integers(0, 65_536, (requests, length)).tolist())

    def mixed(cache: list[Tensor], *qkv: Tensor) -> Tensor:
        first = causal(*(x[:, :, :chunk] for x in qkv))
        q, *new = (x[0, :, chunk:].transpose(0, 1).unsqueeze(2) for x in qkv)
        for old, last in zip(cache, new, strict=True):
            old[:, :, -1:] = last
        return torch.cat([first, everywhere(q, *cache).transpose(0, 1)], 1)

    model.cores = [partial(mixed, cache) for cache in caches_of(model, requests, length)]
    while True:
        with nvprof_kit.phase("schedule"):
            assert prefixes.found() == requests
        logits = model(torch.cat([prompt, generated], 1), slice(chunk, None))
        with nvprof_kit.phase("sample"):
            generated = logits.argmax(-1)
            assert min(generated[0].tolist()) >= 0
        yield logits


class Listener(nn.Module):
    """Frames of sound to their logarithmic spectra, and these through two convolutions."""

    def __init__(self, width: int):
        super().__init__()
        self.bands = torch.rand(161, 80, generator=torch.Generator().manual_seed(0), device="cpu") / 80
        self.on_device, self.window = self.bands.to(NOW.device), torch.hann_window(320)
        self.conv1 = nn.Conv1d(80, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)

    def spectra(self, sound: Tensor) -> Tensor:
        if planted("spectra-on-the-host"):  # as the library transformers extracts features by default
            waves = np.fft.rfft(sound.numpy() * np.hanning(321)[:-1].astype(np.float32))
            power = waves.real**2 + waves.imag**2
            return torch.from_numpy(np.log(power @ self.bands.numpy() + 1e-3)).to(NOW.device)
        waves = torch.fft.rfft(sound.to(NOW.device, non_blocking=True) * self.window)
        return torch.log(waves.abs().square() @ self.on_device + 1e-3)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.spectra(sound).to(NOW.dtype).mT
        return gelu(self.conv2(gelu(self.conv1(x)))).mT


class Codes(nn.Linear):
    """How far each frame is from the nearest code."""

    def __init__(self, width: int):
        super().__init__(width, toy(16, 256), bias=False)
        self.codes = nn.Parameter(torch.randn(toy(40, 2048), toy(16, 256)))

    def forward(self, x: Tensor) -> Tensor:
        x, codes = super().forward(x).flatten(0, 1).float(), self.codes.float()
        mode = "donot_use_mm_for_euclid_dist" if planted("distances-without-matmul") else "use_mm_for_euclid_dist"
        self.nearest = torch.cdist(x, codes, compute_mode=mode).min(-1)
        return self.nearest.values


def encoder() -> Iterator[Tensor]:
    """Speech to the nearest codes of its frames."""
    width = toy(64, 5120)
    with torch.device(NOW.device):
        model = Transformer(width, toy(2, 7), Listener(width), Codes(width))
    nvprof_kit.annotate_model(model)
    model.cores = [everywhere] * len(model.layers)
    sound = pinned(torch.randn(toy(2, 4), toy(16, 1500), 320))
    while True:
        distances = model(sound)
        assert min(model.head.nearest.indices.tolist()) >= 0
        yield distances


class Modulated(Block):
    """A block of a diffusion transformer: the step of the denoising scales and shifts what its norms return."""

    def __init__(self, width: int):
        super().__init__(width, Attention(width, toy(16, 128), 0), MLP(width), nn.LayerNorm)
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, moment: Tensor) -> Tensor:
        if planted("moments-expanded-to-tokens"):
            moment = moment.expand(-1, x.shape[1], -1)
        scale1, shift1, scale2, shift2 = self.modulation(moment).chunk(4, -1)
        core = sliced if planted("attention-in-slices") else everywhere
        x = x + self.attention(torch.addcmul(shift1, self.norm1(x), 1 + scale1), core)
        return x + self.mlp(torch.addcmul(shift2, self.norm2(x), 1 + scale2))


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to all of half of the heads at a time, as diffusers slices it to save memory."""
    halves = []
    for parts in zip(*(x.chunk(2, 1) for x in (q, k, v)), strict=True):
        q, k, v = (x.flatten(0, 1) for x in parts)
        scores = torch.baddbmm(q.new_zeros(1), q, k.mT, alpha=q.shape[-1] ** -0.5)
        halves.append((scores.softmax(-1) @ v).unflatten(0, parts[0].shape[:2]))
    return torch.cat(halves, 1).transpose(1, 2).flatten(2)


class Denoiser(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embed, self.moment = nn.Linear(64, width), nn.Linear(256, width)
        self.layers = nn.ModuleList(Modulated(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, latents: Tensor, moment: Tensor) -> Tensor:
        x, moment = self.embed(latents), F.silu(self.moment(moment)).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, moment)
        return self.head(self.norm(x))


def painter() -> nn.Sequential:
    """From latents to pixels."""
    widths, parts = [16, *[toy(32, size) for size in (512, 512, 256, 128)]], []
    for width, wider in pairwise(widths):
        parts += [nn.Conv2d(width, wider, 3, padding=1), nn.GroupNorm(16, wider), nn.SiLU()]
        parts += [nn.Conv2d(wider, wider, 3, padding=1), nn.Upsample(scale_factor=2)]
    return nn.Sequential(*parts[:-1], nn.Conv2d(widths[-1], 3, 3, padding=1))


def denoise() -> Iterator[Tensor]:
    """Images by a diffusion transformer, a step of the denoising after the other."""
    batch, rows, columns = toy(2, 4), toy(4, 32), toy(4, 64)
    with torch.device(NOW.device):
        model, paint = Denoiser(toy(64, 4096), toy(2, 6)).to(NOW.dtype), painter().to(NOW.dtype)
        model.painter = paint.to(memory_format=torch.channels_last)
        latents = torch.randn(batch, rows * columns, 64, dtype=NOW.dtype)
        moments = torch.randn(100, batch, 256, dtype=NOW.dtype)
    nvprof_kit.annotate_model(model)
    number = 0
    while True:
        latents = latents + 0.01 * (model(latents, moments[number % 100]) - latents)
        if planted("preview-in-each-step"):
            pixels = F.pixel_shuffle(latents.mT.unflatten(2, (rows, columns)), 2)
            with nvprof_kit.phase("preview"):
                image = model.painter(pixels.contiguous(memory_format=torch.channels_last))
                assert len((image.clamp(-1, 1) * 127).to(torch.int8).cpu()) == batch
        number += 1
        yield latents


SERVING = {f.__name__: f for f in (chat, speculate, batcher, encoder, denoise)}
PARALLEL: dict[str, Any] = {}  # two GPUs
PROGRAMS = {**SERVING}


def run(name: str, steps: Iterator[Tensor], numbers: range) -> Tensor:
    """Run these steps of that program and wait for their end; what the last computes."""
    NOW.base, _, NOW.fault = name.partition("+")
    for number in numbers:
        with nullcontext() if NOW.base in ALONE else nvprof_kit.step(number + WARM_UP):
            values = next(steps)
    torch.get_device_module(NOW.device).synchronize()
    return values


def begin(name: str) -> Iterator[Tensor]:
    """The program after its warm-up."""
    NOW.base, _, NOW.fault = name.partition("+")
    NOW.dtype = torch.float32 if NOW.is_toy else torch.bfloat16
    torch.manual_seed(0)
    if NOW.base in PARALLEL and not dist.is_initialized():
        rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if NOW.device == "cpu" else "cpu:gloo,cuda:nccl", **rendezvous)
    torch.set_grad_enabled(NOW.base not in SERVING)
    steps = PROGRAMS[NOW.base]()
    run(name, steps, range(-WARM_UP, 0))
    return steps


def stretch(name: str, steps: Iterator[Tensor], first: int) -> float:
    """The milliseconds of a step, after some that are not timed."""
    run(name, steps, range(first, first + UNTIMED))
    began = time.perf_counter()
    run(name, steps, range(first + UNTIMED, first + UNTIMED + STEPS))
    return (time.perf_counter() - began) * 1e3 / STEPS


def until(path: Path, program: Popen[str] | None = None, limit_s: float = LIMIT_S) -> bool:
    """Sleeps until that file is there, or its folder is gone, or the program has ended; whether it is there."""
    for _ in range(int(limit_s / 0.05)):
        if path.exists() or not path.parent.exists() or (program and program.poll() is not None):
            break
        time.sleep(0.05)
    return path.exists()


def measure(names: list[str], folder: Path, rounds: int) -> None:
    """Times all programs of a base in turn, in this process; rank 0 prints lines of meta.jsonl."""
    programs, ms = {}, {name: [] for name in names}
    for number in range(-2, rounds):  # they are built, and the first round is not counted
        if number == -1:
            gc.collect()
            gc.freeze()
            (folder / "ready").touch()
            until(folder / "go", limit_s=2 * LIMIT_S) or sys.exit("not asked for")
        for name in list(ms)[:: -1 if number % 2 else 1]:
            try:
                if number == -2:
                    programs[name] = begin(name)
                else:
                    ms[name].append(stretch(name, programs[name], (number + 1) * (UNTIMED + STEPS)))
            except Exception as error:
                del ms[name]
                print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)
    ms = {name: times[1:] for name, times in ms.items()}
    clean = ms[names[0]]
    for name, faulty in ms.items() if os.environ.get("RANK", "0") == "0" else ():
        line = {"name": name, "saving_ms": None, "clean_ms": clean, "faulty_ms": [], "steps": CAPTURED}
        if name != names[0]:
            low, saving, high = statistics.quantiles(map(float.__sub__, faulty, clean), n=4)
            medians = {"median_clean_ms": statistics.median(clean), "median_faulty_ms": statistics.median(faulty)}
            line |= {"saving_ms": saving, "saving_spread_ms": high - low, **medians, "faulty_ms": faulty}
        print(json.dumps(line), flush=True)


def collect(name: str, folder: Path) -> None:
    """When asked, runs the steps that nsys captures, and times some before and after them."""
    (folder / "ready").touch()
    until(folder / "go", limit_s=2 * LIMIT_S) or sys.exit("not asked for")
    steps, first, rank = begin(name), UNTIMED + STEPS, os.environ.get("RANK", "0")
    near = [stretch(name, steps, 0)]
    with nullcontext() if NOW.device == "cpu" else torch.cuda.profiler.profile():
        run(name, steps, range(first, first + CAPTURED))
    time.sleep(2)  # nsys still works on what it captured
    near.append(stretch(name, steps, first + CAPTURED))
    (folder / f"near{rank}.json").write_text(json.dumps(near))
    (folder / f"done{rank}").touch()


def start(names: list[str], options: argparse.Namespace, folder: Path, is_capture: bool) -> Popen[str]:
    """Starts what measures the programs of a base, or captures one; it is ended, with all it started, if it hangs."""
    module, task, ranks = [sys.executable, "-m"], "--capture" if is_capture else "--measure", options.ranks
    words = [sys.executable, __file__, task, ",".join(names), "--folder", str(folder), "--device", options.device]
    words += ["--pairs", str(options.pairs), *["--toy"] * options.toy]
    nsys = ["-x", "--capture-range=cudaProfilerApi", "-x", "--capture-range-end=stop"] * (options.device != "cpu")
    if is_capture:
        nsys = ["nvprof_kit", *["ranks"] * (ranks > 1), "profile", "-o", f"{folder}/run", *nsys]
        words = [*module, *nsys, "--", *words]
    if ranks > 1:
        words = [*module, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python", *words]
    words = ["timeout", "--kill-after=10", str(2 * LIMIT_S), "env", "TORCHINDUCTOR_COMPILE_THREADS=4", *words]
    return Popen(words, text=True, stdout=PIPE, stderr=STDOUT)


def pack(line: dict[str, Any], program: Popen[str], folder: Path, out: Path) -> None:
    """When the capture has ended, leaves NAME.sqlite.xz, of rank 0 if there are several, and a line of meta.jsonl."""
    texts: list[str] = []
    try:
        texts = program.communicate(timeout=LIMIT_S)[0].strip().splitlines()
        export = min(folder.glob("*.sqlite"))
        (out / f"{line['name']}.sqlite.xz").write_bytes(lzma.compress(export.read_bytes(), preset=3))
        line["near_ms"] = json.loads((folder / "near0.json").read_text())
        with (out / "meta.jsonl").open("a") as meta:
            print(json.dumps(line), file=meta, flush=True)
    except (OSError, ValueError, SubprocessError) as error:
        print(f"{line['name']}: not captured: {error}, {texts[-3:]}", flush=True)


def names_of(base: str, options: argparse.Namespace) -> list[str]:
    """The program without a fault and those with one, as far as they are asked for and FOLDER lacks them."""
    names = [base, *(name for name in FAULTY if name.partition("+")[0] == base)]
    names = [name for name in names if options.out is None or not (options.out / f"{name}.sqlite.xz").exists()]
    return [name for name in names if not options.only or {name, *name.split("+")} & set(options.only.split(","))]


def measure_and_capture(base: str, names: list[str], options: argparse.Namespace) -> None:
    """Those of a base: a process times all, then one process each is captured; these start now, and sleep till then."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:  # the pool ends first
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        programs: dict[str, Popen[str]] = {}
        for name in ("measured", *names):
            (folder / name).mkdir()
            timed = [name] if name in names else list(dict.fromkeys([base, *names]))
            programs[name] = start(timed, options, folder / name, name in names)
            stack.callback(programs[name].terminate)
        for name, program in programs.items():
            until(folder / name / "ready", program)
        (folder / "measured" / "go").touch()
        texts = programs["measured"].communicate(timeout=3 * LIMIT_S)[0].splitlines()
        print("".join([f"{text}\n" for text in texts if text.startswith(base) or "Error" in text][-12:]), end="")
        measured = map(json.loads, (text for text in texts if text.startswith('{"name"')))
        lines = [line for line in measured if line["name"] in names]
        for line in lines:  # one leaves the GPU to the next, and is exported meanwhile
            print(f"{line['name']}: measured, without the fault a step saves {line['saving_ms']} ms", flush=True)
            (folder / line["name"] / "go").touch()
            until(folder / line["name"] / "done0", programs[line["name"]])
        for line in lines:  # compressed when nothing is measured any more
            pool.submit(pack, line, programs[line["name"]], folder / line["name"], options.out)


def check(options: argparse.Namespace) -> int:
    """Runs all here, each with a fault after the same without; how many failed."""
    failures = 0
    for base in PROGRAMS:
        expected = run(base, begin(base), range(2)) if (names := names_of(base, options)) else None
        for name in names:
            NOW.is_met = False
            try:
                torch.testing.assert_close(run(name, begin(name), range(2)), expected, rtol=1e-3, atol=1e-3)
                assert NOW.is_met or name == base, "nothing of the fault was run"
            except Exception as error:
                failures += 1
                print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
    print(f"{failures} of {len(PROGRAMS) + len(FAULTY)} programs failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"out": None, "only": "", "pairs": 11, "seconds": 500.0, "ranks": 1, "device": "cuda"}
    for name, default in {**defaults, "measure": "", "capture": "", "folder": None}.items():
        parser.add_argument(f"--{name}", default=default, type=Path if default is None else type(default))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    NOW.device, NOW.is_toy = options.device, options.toy
    if options.folder is not None:
        if "LOCAL_RANK" in os.environ and options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        names = (options.capture or options.measure).split(",")
        collect(names[0], options.folder) if options.capture else measure(names, options.folder, options.pairs)
        if dist.is_initialized():
            dist.destroy_process_group()
    elif options.out is None:
        return check(options)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + options.seconds
        for base in PARALLEL if options.ranks > 1 else [base for base in PROGRAMS if base not in PARALLEL]:
            if (names := names_of(base, options)) and time.monotonic() < end:
                measure_and_capture(base, names, options)
                print(f"{base}: done, {end - time.monotonic():.0f} s left", flush=True)
            elif names:
                print(f"{base}: not run, the {options.seconds} s are over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
