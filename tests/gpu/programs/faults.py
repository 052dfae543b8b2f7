"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only prefill,lora+unrounded-hidden] [--pairs 11] [--seconds 500]
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
import json
import lzma
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial, reduce
from itertools import count
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import prune

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("ninth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("speech", "lora")  # annotated by annotate_model alone
NOW = argparse.Namespace(device="cuda", dtype=None, is_toy=False, base="", fault="", is_met=False)  # what runs now
attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
attend_causal = partial(attend, is_causal=True)
checkpointed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def planted(fault: str) -> bool:
    """Whether the program that runs has that fault."""
    NOW.is_met |= fault == NOW.fault
    return fault == NOW.fault


def toy(small: int, real: int) -> int:
    return small if NOW.is_toy else real


def rope(length: int, size: int) -> list[Tensor]:
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    return [values.to(NOW.device, NOW.dtype) for values in (angles.cos(), angles.sin())]


def rotated(x: Tensor, cos: Tensor, sin: Any = None) -> Tensor:
    if sin is None:  # complex numbers, as Llama's own code has them
        turned = torch.complex(*x.float().chunk(2, -1)) * cos
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)
    (real, imaginary), cos, sin = x.chunk(2, -1), cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


class Attention(nn.Module):  # `core` of queries, keys and values, or `cached` of a layer and them
    def __init__(self, index: int, width: int, core: Any = attend_causal, share: int = 1, **how: Any):
        super().__init__()
        self.size, self.tables = toy(16, 64 if width <= 1024 else 128), how.get("tables")
        self.core = partial(how["cached"], index) if "cached" in how else core
        self.heads = [width // self.size, *[width // self.size // share] * 2]
        self.qkv = nn.Linear(width, sum(self.heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2).split(self.heads, 1)
        q, k = (x if self.tables is None else rotated(x, *self.tables) for x in (q, k))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, is_gated: bool):
        super().__init__()
        self.up, self.down = nn.Linear(width, (1 + is_gated) * hidden, False), nn.Linear(hidden, width, False)
        self.is_convolution, self.is_chunked = planted("pointwise-convolutions"), planted("chunked-mlp")

    def forward(self, x: Tensor) -> Tensor:
        if self.is_convolution:  # NeMo, PyTorch's issues: Conv1d of size 1 is slower than Linear
            x = F.gelu(F.conv1d(x.mT.contiguous(), self.up.weight[:, :, None]))
            return F.conv1d(x, self.down.weight[:, :, None]).mT.contiguous()
        if self.is_chunked and x.shape[1] > toy(4, 128):  # HF chunk_size_feed_forward: memory for time
            return torch.cat([self(part) for part in x.split(toy(4, 128), 1)], 1)
        gate, *up = self.up(x).split(self.down.weight.shape[1], -1)
        return self.down(F.silu(gate) * up[0] if up else F.gelu(gate))


class Experts(nn.Module):  # each chooses its tokens, two experts a token on average; a shared expert takes all
    def __init__(self, width: int, experts: int = 16):
        super().__init__()
        self.router, self.shared = nn.Linear(width, experts, bias=False), MLP(width, 2 * width, True)
        self.up, self.down = (nn.Parameter(values / 40) for values in torch.randn(2, experts, width, 2 * width))

    def forward(self, x: Tensor) -> Tensor:
        tokens, up, down = x.flatten(0, 1), self.up, self.down
        if planted("stacked-experts"):  # HF Transformers 5: weights of experts are merged once, when they are loaded
            up, down = (torch.stack(weights.unbind(0)) for weights in (up, down))
        gates, chosen = self.router(tokens).float().softmax(-1).topk(2 * len(tokens) // len(up), 0)
        slots, gates = chosen.T.flatten(), gates.T.flatten()[:, None].to(x.dtype)
        hidden = F.gelu(torch.bmm(tokens.index_select(0, slots).unflatten(0, (len(up), -1)), up))
        made = torch.zeros_like(tokens).index_add(0, slots, torch.bmm(hidden, down.mT).flatten(0, 1) * gates)
        return self.shared(x) + made.view_as(x)


class Block(nn.Module):  # of a diffusion transformer if it has a condition
    def __init__(self, index: int, width: int, hidden: int = 0, is_gated: bool = True, kind: str = "", **how: Any):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(index, width, **how)
        self.mlp_norm, self.condition = nn.RMSNorm(width), how.get("condition")
        self.mlp = Experts(width) if kind == "mixture" else MLP(width, hidden or 4 * width, is_gated)
        self.modulation = nn.Linear(width, 6 * width) if self.condition is not None else None
        self.is_again = planted("recompute-experts")  # Megatron-LM: only where memory is short

    def forward(self, x: Tensor) -> Tensor:
        if self.modulation is not None:
            kind = torch.float if planted("fp32-modulation") else x.dtype  # Wan 2.1: autocast to fp32 around it
            changes = self.modulation(self.condition)[:, None].to(kind).chunk(6, -1)
            for at, norm, part in ((0, self.attention_norm, self.attention), (3, self.mlp_norm, self.mlp)):
                made = part(torch.addcmul(changes[at], norm(x).to(kind), 1 + changes[at + 1]).to(x.dtype))
                x = torch.addcmul(x.to(kind), changes[at + 2], made.to(kind)).to(x.dtype)
            return x
        x = x + self.attention(self.attention_norm(x))
        made = self.mlp_norm(x)
        return x + (checkpointed(self.mlp, made) if self.is_again else self.mlp(made))


class Transformer(nn.Module):  # tokens, patches or sound to logits, of all places or of some
    def __init__(self, layers: int, width: int, words: int = 32_000, patch: int = 0, embed: Any = None, **how: Any):
        super().__init__()
        width, words = toy(64, width), toy(min(256, words), words)
        with torch.device(NOW.device):
            self.embed = embed or (nn.Linear(patch, width) if patch else nn.Embedding(words, width))
            self.layers = nn.ModuleList(Block(index, width, **how) for index in range(toy(2, layers)))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.to(NOW.device, NOW.dtype)
        nvprof_kit.annotate_model(self) if NOW.base in SERVING else None

    def forward(self, ids: Tensor, place: int | slice = slice(None)) -> Tensor:
        x = self.embed(ids).mT.contiguous() if isinstance(self.embed, nn.Sequential) else self.embed(ids)
        return self.head(self.norm(reduce(lambda x, layer: layer(x), self.layers, x))[:, place])


def tokens(batch: int, length: int, words: int = 32_000) -> Tensor:
    return torch.randint(3, toy(256, words), (toy(2, batch), toy(16, length)), device=NOW.device)


def prefill() -> Iterator[Tensor]:
    """Long prompts; three layers of four have linear attention."""
    prompts, size, share, chunk = tokens(2, 4096), toy(16, 128), toy(4, 12), toy(8, 128)

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if index % 4 == 0:
            return attend_causal(q, k, v)
        kind = torch.float if planted("fp32-linear-attention") else q.dtype  # Mamba 2, FLA: products in bf16
        q, k, v = (q / q.shape[2]).to(kind), *(x.repeat_interleave(share, 1).to(kind) for x in (k, v))
        if not planted("loop-over-chunks"):
            q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
            sums = k.mT @ v
            return ((q @ k.mT).tril() @ v + q @ (sums.cumsum(2) - sums)).flatten(2, 3).to(NOW.dtype)
        made, state = [], k.new_zeros(1, 1, size, size)
        for a, b, c in zip(*(x.split(chunk // 2, 2) for x in (q, k, v)), strict=True):  # Mamba's issues: its slow path
            made.append((a @ b.mT).tril() @ c + a @ state)
            state = state + b.mT @ c
        return torch.cat(made, 2)

    model = Transformer(8, 3072, cached=core, share=share, tables=rope(toy(16, 4096), size), hidden=toy(128, 8192))
    return (model(prompts, -1) for _ in count())


def decode() -> Iterator[Tensor]:
    """Four tokens for each sequence, eager."""
    batch, window, size, tables, state = toy(2, 96), toy(8, 4096), toy(16, 128), [], list(range(25_000))
    cache = torch.randn(toy(2, 10), 2, batch, toy(1, 4), window, size, device=NOW.device, dtype=NOW.dtype)

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = cache[index]
        past[0, :, :, at], past[1, :, :, at] = k[:, :, 0], v[:, :, 0]
        if index % 3 == 0 and planted("gathered-pages"):  # PagedAttention: a kernel reads the pages where they are
            past = past.index_select(1, rows)
        return attend(q, *past)

    def serve(is_over: threading.Event) -> None:  # vLLM 0.6: an API server in the engine's process holds the GIL
        while not is_over.wait(0.002):
            json.dumps(state)

    model = Transformer(10, 2048, cached=core, share=4, tables=tables, hidden=toy(128, 5632))
    token, angles, rows = tokens(96, 1)[:, :1], rope(window, size), torch.arange(batch, device=NOW.device)
    for number in count():
        is_over = threading.Event()
        server = threading.Thread(target=serve, args=(is_over,), daemon=True)
        server.start() if planted("server-thread") else None
        for at in range(4 * number % window, 4 * number % window + 4):
            tables[:] = [values[at : at + 1] for values in angles]
            logits = model(token, -1).float()
            token = logits.argmax(-1, keepdim=True)
        token.tolist()
        is_over.set()
        yield logits


def engine() -> Iterator[Tensor]:
    """A part of a prompt, and a token for each of the other sequences, in one batch."""
    part, others, window, size = toy(16, 2048), toy(2, 32), toy(32, 2048), toy(16, 128)
    cache = torch.randn(12, 2, (others + 1) * window, toy(1, 8), size, device=NOW.device, dtype=NOW.dtype)
    firsts, places = (torch.arange(number, device=NOW.device) for number in (others, part + others))
    ids, slots, angles, tables = places[None] % 256, others * window + places, rope(window, size), []
    requests = [{"tokens": list(range(toy(8, 800))), "is_done": False} for _ in range(others + 1)]

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for past, new in zip(cache[index], (k, v), strict=True):
            past.index_copy_(0, slots, new[0].transpose(0, 1))
        past = (x.unflatten(0, (-1, window))[:others].transpose(1, 2) for x in cache[index])
        each = attend(q[0, :, part:].transpose(0, 1)[:, :, None], *past)
        return torch.cat([attend_causal(*(x[:, :, :part] for x in (q, k, v))), each[:, :, 0].transpose(0, 1)[None]], 2)

    model, is_amp = Transformer(12, 4096, cached=core, share=4, tables=tables), planted("autocast-weights")
    model.float() if is_amp else None  # PyTorch, HF: load in bf16; autocast casts all weights in each forward
    for number in count():
        places[part:] = number % window
        slots[part:] = firsts * window + number % window
        tables[:] = [values.index_select(0, places) for values in angles]
        with torch.autocast(NOW.device, torch.bfloat16, enabled=is_amp and not NOW.is_toy):
            logits = model(ids, slice(part - 1, None))[0].float()
        best = logits.argmax(-1)  # SGLang, vLLM: schedule the next batch while the GPU computes this one
        best.tolist() if planted("schedule-after") else None
        requests = json.loads(json.dumps(requests))
        best.tolist()
        yield logits


def graphs() -> Iterator[Tensor]:
    """Four tokens for each sequence, each by a CUDA graph, of those that a grammar allows."""
    batch, window, size, layers, tables, angles = toy(2, 64), toy(8, 512), toy(16, 128), 14, [], rope(512, toy(16, 128))
    kind = torch.float if planted("fp32-cache") else NOW.dtype  # HF StaticCache: it was fp32 unless told
    kv = torch.randn(layers, 2, batch, toy(1, 8), window, size, device=NOW.device, dtype=kind)
    at, token = torch.zeros(1, dtype=torch.long, device=NOW.device), tokens(64, 1)[:, :1].clone()
    rules = -100.0 * torch.randint(2, (256, toy(256, 32_000)))
    kept, allowed = rules.to(NOW.device), rules[:batch].clone().to(NOW.device)

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for past, new in zip(kv[index], (k, v), strict=True):
            past.index_copy_(2, at, new.to(past.dtype))
        return attend(q, *kv[index].to(q.dtype))

    model = Transformer(layers, 4096, cached=core, share=4, tables=tables, hidden=toy(128, 11_008))
    for linear in [linear for layer in model.layers[1::4] for linear in (layer.mlp.up, layer.mlp.down)]:
        prune.custom_from_mask(linear, "weight", linear.weight.abs() > 0.3 * linear.in_features**-0.5)
        prune.remove(linear, "weight") if not planted("pruning-masks") else None  # PyTorch's tutorial on pruning

    def next_token() -> None:
        tables[:] = [values.index_select(0, at) for values in angles]
        token.copy_((model(token, -1).float() + allowed).argmax(-1, keepdim=True))
        at.copy_((at + 1) % window)

    next_token()
    graph = argparse.Namespace(replay=next_token) if NOW.device == "cpu" else torch.cuda.CUDAGraph()
    with nullcontext() if NOW.device == "cpu" else torch.cuda.graph(graph):
        next_token()
    for number in count():
        for first in range(4 * number % 192, 4 * number % 192 + 4):
            part = slice(first, first + batch)  # XGrammar: masks of bits, not of floats that the host stacks and sends
            allowed.copy_(torch.stack([*rules[part]]) if planted("masks-from-host") else kept[part])
            graph.replay()
            token.tolist()
        yield token.clone()


def speech() -> Iterator[Tensor]:
    """Embeddings of sound, whose length varies, by an encoder like Whisper's."""
    width, audio = toy(64, 1280), torch.randn(toy(3200, 480_000), toy(2, 6), pin_memory=NOW.device != "cpu")

    def mel(samples: Tensor) -> Tensor:
        window = torch.hann_window(400, device=samples.device)
        power = torch.stft(samples, 400, 160, window=window, return_complex=True)[..., :-1].abs() ** 2
        logs = (torch.linspace(0, 1, 80 * 201, device=samples.device).view(80, 201) @ power).clamp(min=1e-10).log10()
        return torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8) / 4 + 1

    stem = nn.Sequential(nn.Conv1d(80, width, 3, 1, 1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU())
    model = Transformer(24, 1280, 512, embed=stem, core=attend, is_gated=False)
    for number in count():  # PyTorch's tuning guide: cudnn.benchmark is not for sizes that vary
        torch.backends.cudnn.benchmark = planted("benchmark-each-length")
        samples = audio[: len(audio) - 320 * (number // 3 % toy(4, 1000))]
        if not planted("host-features"):  # HF WhisperFeatureExtractor: device="cuda"
            samples = samples.to(NOW.device, non_blocking=True)
        yield model(mel(samples.T).to(NOW.device, NOW.dtype)).float().mean(1).cpu()


def diffusion() -> Iterator[Tensor]:
    """A step of a diffusion transformer with guidance, and the images that a decoder makes of its latents."""
    images, side, wide = toy(2, 8), toy(4, 32), toy(32, 512)
    latents = torch.randn(images, side * side, 16, device=NOW.device, dtype=NOW.dtype)
    condition = torch.randn(2 * images, toy(64, 1152), device=NOW.device, dtype=NOW.dtype)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not planted("attention-slicing"):  # Diffusers: not with scaled_dot_product_attention
            return attend(q, k, v)
        slices = zip(*(x.split(1, 1) for x in (q * q.shape[-1] ** -0.5, k, v)), strict=True)
        return torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in slices], 1)

    model = Transformer(20, 1152, 16, patch=16, core=core, is_gated=False, condition=condition)
    kind = torch.float if planted("fp32-decoder") else NOW.dtype  # Diffusers: force_upcast of a VAE; one fixed for fp16
    stages = (nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2.0)) for _ in range(3))
    decoder = nn.Sequential(nn.Conv2d(16, wide, 3, 1, 1), *stages, nn.Conv2d(wide, 3, 3, 1, 1))
    decoder.to(NOW.device, NOW.dtype).to(kind, memory_format=torch.channels_last)
    nvprof_kit.annotate_model(decoder, steps=False)
    while True:
        given, free = model(latents.repeat(2, 1, 1)).chunk(2)
        made = (latents - 0.1 * (free + 4 * (given - free))).mT.unflatten(2, (side, side))
        yield decoder(made.to(kind, memory_format=torch.channels_last)).float()


def training(model: nn.Module, loss_of: Any, read: Any = None, parts: int = 1) -> Iterator[Tensor]:
    """Steps of AdamW: `read` makes a batch, `loss_of` takes each part of it."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, 1e-5, fused=True)
    is_amp = (NOW.base in ("pretrain", "compiled", "ddp") or planted("fp32-shards")) and not NOW.is_toy
    nvprof_kit.annotate_model(model, optimizer=None if NOW.base in ALONE else optimizer)
    phase: Any = nullcontext if NOW.base in ALONE else nvprof_kit.phase
    while True:
        losses = []
        with phase("data"):
            batch = read().to(NOW.device, non_blocking=True) if read else None
        for part in range(parts):
            if NOW.base == "fsdp":
                model.set_requires_gradient_sync(part == parts - 1)
                model.set_reshard_after_backward(part == parts - 1 or planted("reshard-each-part"))
            with phase("forward"), torch.autocast(NOW.device, torch.bfloat16, enabled=is_amp):
                loss = loss_of(batch, part)
            with phase("backward"):
                loss.backward()
            losses.append(loss.detach())
        if planted("double-norm"):  # DeepSpeed: grad.double().norm(2) of each weight
            norms = torch.stack([weight.grad.double().norm() for weight in weights])
            nn.utils.clip_grads_with_norm_(weights, 1.0, norms.norm().to(NOW.dtype))
        else:
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        model.zero_grad()
        yield reduce(torch.add, losses).float()


def next_token_loss(model: Any, ids: Tensor, *_: Any) -> Tensor:
    logits, labels = model(ids).float(), F.pad(ids[:, 1:], (0, 1), value=-100)
    if planted("shifted-logits"):  # HF ForCausalLMLoss, Liger: shift the labels, and do not copy the logits
        logits, labels = logits[:, :-1].contiguous(), ids[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pretrain() -> Iterator[Tensor]:
    """All weights of a small model, in fp32 with autocast; its texts come from workers."""
    model, is_kept = Transformer(8, 1024, 50_304, is_gated=False), not planted("short-lived-workers")
    how = {"num_workers": toy(2, 8), "multiprocessing_context": "fork", "pin_memory": NOW.device != "cpu"}
    texts = [*torch.cat([tokens(16, 1024, 50_304) for _ in range(4)]).cpu()]
    loader = torch.utils.data.DataLoader(texts, len(texts) // 4, persistent_workers=is_kept, **how)  # PyTorch: True
    batches = (batch for _ in count() for batch in loader)
    return training(model, lambda batch, _: next_token_loss(model, batch), batches.__next__)


def lora() -> Iterator[Tensor]:
    """Adapters of rank 16 beside the projections of the attention, for long texts."""
    ids, full, odd = tokens(1, 10_240), toy(176, 6912), toy(171, 6826)  # Llama's multiple_of: 8/3 of a width is odd
    hidden = odd if planted("unrounded-hidden") else full
    is_again = planted("recompute-attention")  # Megatron-LM: with FlashAttention, this saves no memory
    how = {"core": partial(checkpointed, attend_causal) if is_again else attend_causal, "share": 4, "hidden": full}
    model = Transformer(4, 2560, tables=rope(ids.shape[1], toy(16, 128)), **how).requires_grad_(False)
    for mlp in [layer.mlp for layer in model.layers]:
        up, down = mlp.up.weight.data.unflatten(0, (2, -1)), mlp.down.weight.data
        up[:, odd:], down[:, odd:] = 0, 0
        mlp.up.weight.data, mlp.down.weight.data = up[:, :hidden].flatten(0, 1), down[:, :hidden].contiguous()
    for linear in [getattr(layer.attention, name) for layer in model.layers for name in ("qkv", "out")]:
        ends = (nn.Linear(*size, False, NOW.device) for size in ((linear.in_features, 16), (16, linear.out_features)))
        linear.adapter = nn.Sequential(*ends).to(NOW.dtype)
        linear.register_forward_hook(lambda linear, x, y: y + linear.adapter(x[0]))
    return training(model, partial(next_token_loss, model, ids))


def moe() -> Iterator[Tensor]:
    """A mixture of experts, in bf16."""
    model = Transformer(4, 1536, 16_000, kind="mixture", share=4, tables=rope(toy(16, 1024), toy(16, 128)))
    return training(model, partial(next_token_loss, model, tokens(4, 1024, 16_000)))


def compiled() -> Iterator[Tensor]:
    """Layers compiled one by one, in fp32 with autocast."""
    torch._dynamo.reset() if NOW.is_toy else None
    ids, is_debug, tables = tokens(24, 512, 16_000), planted("debug-backend"), rope(toy(16, 512), toy(16, 64))
    if planted("complex-rotary"):  # torch.compile warns that it makes no code for complex numbers
        tables = [torch.complex(*tables)]
    model = Transformer(8, 1024, 16_000, hidden=toy(128, 2816), tables=tables)
    for layer in model.layers:  # torch.compile's troubleshooting guide: aot_eager is for debugging
        layer.compile(backend="aot_eager" if is_debug or NOW.is_toy else "inductor", dynamic=False)
    return training(model, partial(next_token_loss, model, ids))


def ddp() -> Iterator[Tensor]:
    """Images, by a model that has a copy on each GPU."""
    model = Transformer(12, 1536, 1000, 768, core=attend, is_gated=False)
    images, rank = torch.randn(toy(4, 32), toy(4, 196), 768, pin_memory=NOW.device != "cpu"), dist.get_rank()
    labels, ranks = torch.arange(len(images), device=NOW.device), dist.get_world_size()
    for layer in model.layers if planted("broadcast-buffers") else ():  # nanoGPT, HF: masks, which DDP sends each time
        layer.register_buffer("bias", torch.ones(toy(32, 4096), toy(32, 4096), device=NOW.device).tril())
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def read() -> Tensor:
        if planted("last-rank-logs") and rank == ranks - 1:  # Megatron-LM: the last rank logs, and the others wait
            torch.histc(model.layers[0].attention.out.weight.detach().cpu(), 64)
        if planted("dispatch-batches"):  # Accelerate's dispatch_batches: rank 0 reads and sends
            dist.broadcast_object_list(batches := [torch.cat([images] * ranks)], 0)
        return batches[0].chunk(ranks)[rank] if planted("dispatch-batches") else images

    return training(parallel, lambda batch, _: F.cross_entropy(parallel(batch, 0).float(), labels), read)


def fsdp() -> Iterator[Tensor]:
    """Weights, gradients and states in shards; gradients of four parts are accumulated."""
    ids, kind = tokens(4, 1024), None if NOW.is_toy or planted("fp32-shards") else torch.bfloat16
    model = Transformer(4, 4096, share=4, tables=rope(ids.shape[1], toy(16, 128)), hidden=toy(128, 11_008))
    policy = MixedPrecisionPolicy(kind, kind)  # torchtitan: autocast gathers fp32, and casts; param_dtype gathers bf16
    for part in (*model.layers, model):  # FSDP2: keep the weights between the parts, where memory allows
        fully_shard(part, mp_policy=policy, reshard_after_forward=planted("reshard-each-part"))
    return training(model, lambda _, part: next_token_loss(model, ids.chunk(4)[part % len(ids)]), parts=4)


SERVING = dict(prefill=prefill, decode=decode, engine=engine, graphs=graphs, speech=speech, diffusion=diffusion)
PARALLEL = {"ddp": ddp, "fsdp": fsdp}  # two GPUs
PROGRAMS = {**SERVING, "pretrain": pretrain, "lora": lora, "moe": moe, "compiled": compiled, **PARALLEL}


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
    is_fp32 = NOW.is_toy or NOW.base in ("pretrain", "compiled", "ddp", "fsdp")
    NOW.dtype = torch.float32 if is_fp32 else torch.bfloat16
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
