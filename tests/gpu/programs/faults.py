"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only prefill,decode+cat-cache] [--pairs 11] [--seconds 500]
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
import copy
import gc
import json
import lzma
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial, reduce
from itertools import count
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("eighth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("reranker", "gpt")  # annotated by annotate_model alone
NOW = argparse.Namespace(device="cuda", dtype=None, is_toy=False, base="", fault="", is_met=False)  # what runs now
attend, attend_causal = F.scaled_dot_product_attention, partial(F.scaled_dot_product_attention, is_causal=True)


def planted(fault: str) -> bool:
    """Whether the program that runs has that fault."""
    NOW.is_met |= fault == NOW.fault
    return fault == NOW.fault


def toy(small: int, real: int) -> int:
    return small if NOW.is_toy else real


class Attention(nn.Module):
    """What `core` computes of queries, keys and values, or `cached` of them and a layer, between two projections."""

    def __init__(self, index: int, width: int, core: Any = attend_causal, cached: Any = None, share: int = 1):
        super().__init__()
        self.size, self.core = toy(16, 64 if width <= 1024 else 128), partial(cached, index) if cached else core
        self.heads = [width // self.size, *[width // self.size // share] * 2]
        self.qkv = nn.Linear(width, sum(self.heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2).split(self.heads, 1)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention to what an encoder computed of the audio."""

    def __init__(self, width: int, states: Tensor):
        super().__init__()
        self.states, self.past, self.size = states, None, toy(16, 128)
        self.q, self.kv, self.out = (nn.Linear(width, times * width, bias=False) for times in (1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.past is None or planted("cross-kv-again"):  # HF Whisper: cross-attention states belong into the cache
            self.past = self.kv(self.states).unflatten(-1, (2, -1, self.size)).permute(2, 0, 3, 1, 4)
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        return self.out(attend(q, *self.past).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.act, self.checked = partial(F.gelu, approximate="tanh"), checked if planted("nan-checks") else lambda x: x
        if planted("written-out-gelu"):  # Megatron-LM, HF NewGELUActivation: use the fused one
            self.act = lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))

    def forward(self, x: Tensor) -> Tensor:
        return self.checked(self.down(self.act(self.checked(self.up(x)))))


def checked(x: Tensor) -> Tensor:  # torch.compile's guide on graph breaks: a branch on data
    if x.isnan().any():
        raise ValueError("not a number")
    return x


class Experts(nn.Module):
    """Each expert chooses its tokens, two experts a token on average."""

    def __init__(self, width: int, experts: int = 16):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, chosen = self.router(tokens).float().softmax(-1).topk(2 * len(tokens) // len(self.up), 0)
        slots = chosen.T.flatten()
        is_onehot = planted("onehot-dispatch")  # GShard's einsum with one-hot masks; MegaBlocks and Tutel: gather
        if is_onehot:
            onehot = (slots[:, None] == torch.arange(len(tokens), device=x.device)).to(x.dtype)
        sent = onehot @ tokens if is_onehot else tokens.index_select(0, slots)
        hidden = F.gelu(torch.bmm(sent.unflatten(0, (len(self.up), -1)), self.up))
        made = torch.bmm(hidden, self.down).flatten(0, 1) * gates.T.flatten()[:, None].to(x.dtype)
        return (onehot.T @ made if is_onehot else torch.zeros_like(tokens).index_add(0, slots, made)).view_as(x)


class Block(nn.Module):
    """A layer; `call` calls its attention and its MLP."""

    def __init__(self, index: int, width: int, states: Any = None, is_mixture: bool = False, **how: Any):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(index, width, **how)
        self.cross, self.call = None, lambda part, x: part(x)
        if states is not None:
            self.cross_norm, self.cross = nn.RMSNorm(width), CrossAttention(width, states)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), Experts(width) if is_mixture else MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.call(self.attention, self.attention_norm(x))
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x))
        return x + self.call(self.mlp, self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens, or patches of images, to logits: of all places, or of one alone."""

    def __init__(self, layers: int, width: int, vocabulary: int = 32_000, patch: int = 0, **how: Any):
        super().__init__()
        width, vocabulary = toy(64, width), toy(256, vocabulary)
        with torch.device(NOW.device):
            self.embed = nn.Linear(patch, width) if patch else nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Block(index, width, **how) for index in range(toy(2, layers)))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.to(NOW.dtype)
        if NOW.base in SERVING:
            nvprof_kit.annotate_model(self)

    def forward(self, ids: Tensor, place: int | slice = slice(None)) -> Tensor:
        x = reduce(lambda x, layer: layer(x), self.layers, self.embed(ids))
        return self.head(self.norm(x)[:, place])


def tokens(batch: int, length: int, vocabulary: int = 32_000) -> Tensor:
    return torch.randint(3, toy(256, vocabulary), (toy(2, batch), toy(16, length)), device=NOW.device)


def random(*layout: int) -> Tensor:
    return torch.randn(layout, device=NOW.device, dtype=NOW.dtype)


def prefill() -> Iterator[Tensor]:
    """Long prompts, whose last place alone has logits."""
    prompts, length, size = tokens(2, 4096), toy(16, 4096), toy(16, 128)
    mask = torch.full((length, length), -torch.inf, device=NOW.device, dtype=NOW.dtype).triu(1)

    def tables(device: str) -> list[Tensor]:
        places = torch.arange(length, device=device).expand(len(prompts), -1)[:, None, :, None]
        angles = places * 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.cat([angles, angles], -1)
        return [values.to(NOW.device, NOW.dtype) for values in (angles.cos(), angles.sin())]

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = tables("cpu") if planted("rope-on-host") else kept  # PyTorch tuning guide: create on the device
        q, k = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))
        return attend(q, k, v, mask) if planted("dense-mask") else attend_causal(q, k, v)  # no mask for FlashAttention

    kept = tables(NOW.device)
    model = Transformer(8, 2560, core=core)
    return (model(prompts, -1) for _ in count())


def reranker() -> Iterator[Tensor]:
    """Scores of pairs of texts, by an encoder."""
    model, pairs = Transformer(12, 1024, core=attend), tokens(64, 256)
    size = toy(1, 4) if planted("small-batches") else len(pairs)  # HF pipelines: batches that fill the GPU
    return (torch.cat([model(part, 0)[:, :8] for part in pairs.split(size)]) for _ in count())


def decode() -> Iterator[Tensor]:
    """Two tokens for each sequence, eager; or three of texts for audio, by the decoder of a model like Whisper."""
    is_audio, layers, at = NOW.base == "transcribe", 8, 0
    batch, window, width, words = (48, 448, 1280, 51_872) if is_audio else (64, 2048, 2048, 128_000)
    batch, window, size = toy(2, batch), toy(8, window), toy(16, 128)
    cache = [[random(batch, toy(64, width) // size, window, size) for _ in range(2)] for _ in range(layers)]

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for which, new in enumerate((k, v)):
            if planted("cat-cache"):  # gpt-fast, HF StaticCache: write into a cache of fixed size
                cache[index][which] = torch.cat([cache[index][which][:, :, 1:], new], 2)
            else:
                cache[index][which][:, :, at] = new[:, :, 0]
        return attend(q, *cache[index])

    states = random(batch, toy(16, 1500), toy(64, width)) if is_audio else None
    model, token = Transformer(layers, width, words, cached=core, states=states), tokens(batch, 1, words)[:, :1]
    if planted("fp32-head"):  # vLLM: logits in fp32, but the product in the model's type
        model.head.forward = lambda x: F.linear(x.float(), model.head.weight.float())
    for layer in model.layers if planted("sync-per-layer") else ():  # PyTorch tuning guide: needless synchronisation
        layer.register_forward_hook(lambda *_: torch.get_device_module(NOW.device).synchronize(), prepend=True)

    def sampled(scores: Tensor) -> Tensor:
        best = scores.topk(50)
        if planted("whole-vocabulary"):  # FlashInfer, vLLM: sampling that sorts all the vocabulary
            best = scores.masked_fill(scores < best.values[:, -1:], -torch.inf).sort(descending=True)
        return best.indices.gather(-1, (best.values.softmax(-1).cumsum(-1) < 0.5).sum(-1, keepdim=True))

    while True:
        for _ in range(3 if is_audio else 2):
            logits = model(token, -1).float()
            token = logits.argmax(-1, keepdim=True) if is_audio else sampled(logits / 0.7)
            at = (at + 1) % window
        yield logits


def engine() -> Iterator[Tensor]:
    """A part of a prompt, and a token for each of the other sequences, in one batch."""
    width, size, part, others, window, page = toy(64, 2048), toy(16, 128), toy(16, 2048), toy(2, 16), toy(32, 2048), 16
    cache = random(toy(2, 12), 2, (others + 1) * window, width // size, size)
    slots = torch.zeros(part + others, dtype=torch.long, device=NOW.device)
    owners, places = [others] * part + list(range(others)), [0]
    pages = [[row * (window // page) + index for index in range(window // page)] for row in range(others + 1)]
    requests = [{"tokens": list(range(toy(8, 800))), "pages": row, "state": {"done": False}} for row in pages]

    def located() -> Tensor:
        table, owner, place = (torch.tensor(rows, device=NOW.device) for rows in (pages, owners, places))
        return table[owner, place // page] * page + place % page

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = located() if planted("tables-per-layer") else slots  # vLLM V1: keep inputs, do not build them again
        for past, new in zip(cache[index], (k, v), strict=True):
            past.index_copy_(0, where, new[0].transpose(0, 1))
        ahead = attend_causal(*(x[:, :, :part] for x in (q, k, v)))
        past = (x.unflatten(0, (-1, window))[:others].transpose(1, 2) for x in cache[index])
        each = attend(q[0, :, part:].transpose(0, 1)[:, :, None], *past)
        return torch.cat([ahead, each[:, :, 0].transpose(0, 1)[None]], 2)

    model, ids = Transformer(12, 2048, cached=core), torch.randint(3, 256, (1, part + others), device=NOW.device)
    for number in count(-WARM_UP):
        places[:] = [*range(part), *[number % window] * others]
        slots.copy_(located())
        if planted("deepcopy-requests"):  # vLLM 0.6: the scheduler's work on the CPU, while the GPU waits
            requests = copy.deepcopy(requests)
        logits = model(ids)[0, part - 1 :].float()
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request["tokens"][number % len(request["tokens"])] = token
        yield logits


def graphs() -> Iterator[Tensor]:
    """Three tokens for each sequence, each by a CUDA graph."""
    batch, window, width, size, share = toy(2, 64), toy(8, 320), toy(64, 4096), toy(16, 128), 4
    kv = random(toy(2, 14), 2, batch, width // size // share, window, size)
    at, token, logits = torch.zeros(1, dtype=torch.long, device=NOW.device), tokens(64, 1)[:, :1].clone(), None
    sent = torch.zeros_like(token, device="cpu", pin_memory=NOW.device != "cpu")

    def core(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for past, new in zip(kv[index], (k, v), strict=True):
            past.index_copy_(2, at, new)
        if planted("repeat-kv"):  # HF repeat_kv: a kernel reads shared heads where they are
            return attend(q, *(past.repeat_interleave(share, 1) for past in kv[index]))
        return attend(q, *kv[index], enable_gqa=True)

    model = Transformer(14, width, cached=core, share=share)

    def next_token() -> None:
        nonlocal logits
        logits = model(token, -1)
        token.copy_(logits.argmax(-1, keepdim=True))
        at.copy_((at + 1) % window)

    next_token()
    graph = argparse.Namespace(replay=next_token) if NOW.device == "cpu" else torch.cuda.CUDAGraph()
    with nullcontext() if NOW.device == "cpu" else torch.cuda.graph(graph):
        next_token()
    home, event = kv.clone() if planted("copied-inputs") else kv, torch.get_device_module(NOW.device).Event()
    while True:
        for _ in range(3):
            if planted("copied-inputs"):  # PyTorch on CUDA graphs: static inputs are written in place
                kv.copy_(home.copy_(kv))
            graph.replay()
            sent.copy_(token, non_blocking=True)
            event.record()
            while planted("sleep-poll") and not event.query():  # vLLM: an engine that polls with a pause
                time.sleep(0.005)
            event.synchronize()
        yield logits


def training(model: nn.Module, loss_of: Any, look: Any = None, read: Any = None, parts: int = 1) -> Iterator[Tensor]:
    """Steps of AdamW: `read` makes a batch, `loss_of` takes each part of it, `look` each weight with its gradient."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, 1e-5, fused=True)
    is_alone, is_amp = NOW.base in ALONE, NOW.base in ("gpt", "compiled", "ddp") and not NOW.is_toy
    nvprof_kit.annotate_model(model, optimizer=None if is_alone else optimizer)
    phase: Any = nullcontext if is_alone else nvprof_kit.phase
    while True:
        torch.autograd.set_detect_anomaly(planted("detect-anomaly"))  # PyTorch tuning guide: no debugging APIs
        losses = []
        with phase("data"):
            batch = read().to(NOW.device, non_blocking=True) if read else None
        for part in range(parts):
            with nullcontext() if part == parts - 1 or planted("no-no-sync") else model.no_sync():  # DDP's no_sync
                with phase("forward"), torch.autocast(NOW.device, torch.bfloat16, enabled=is_amp):
                    loss = loss_of(batch, part)
                with phase("backward"):
                    loss.backward()
            losses.append(loss.detach())
        for weight in weights if planted("metrics-one-by-one") or planted("full-tensors") else ():
            look(weight)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield reduce(torch.add, losses).float()


def next_token_loss(model: Transformer, ids: Tensor, *_: Any) -> Tensor:
    logits = model(ids).to(torch.double if planted("double-loss") else torch.float)  # CUDA guide: float would do
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def gpt() -> Iterator[Tensor]:
    """All weights of a small model, in fp32 with autocast."""
    words, ids = toy(257, 50_257), tokens(8, 1024)
    past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=NOW.device).tril()

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # nanoGPT: FlashAttention, no T x T matrix
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~past, -torch.inf).softmax(-1) @ v

    model = Transformer(12, 768, core=written_out if planted("written-out-attention") else attend_causal)
    width, rows = model.head.in_features, words if planted("odd-vocabulary") else toy(264, 50_304)
    with torch.device(NOW.device):  # nanoGPT: a vocabulary of 50,304, a multiple of 64, in place of 50,257
        weight = 0.02 * torch.randn(words, width)
        model.embed, model.head = nn.Embedding(words, width), nn.Linear(width, rows)
        nn.init.zeros_(model.head.bias).data[words:] = -1e4
        model.head.weight.data[:words] = weight
    return training(model, partial(next_token_loss, model, ids))


def lora() -> Iterator[Tensor]:
    """Adapters of rank 16 beside the projections of the attention."""
    model, ids = Transformer(8, 2560, 64_000).requires_grad_(False), tokens(2, 2048, 64_000)
    kind = torch.float32 if planted("fp32-adapters") else NOW.dtype  # PEFT: autocast_adapter_dtype=False
    for linear in [getattr(layer.attention, name) for layer in model.layers for name in ("qkv", "out")]:
        ends = (nn.Linear(*size, False, NOW.device) for size in ((linear.in_features, 16), (16, linear.out_features)))
        linear.adapter = nn.Sequential(*ends).to(kind)
        linear.register_forward_hook(lambda linear, x, y: y + linear.adapter(x[0].to(kind)).to(y.dtype))

    def offload(forward: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=NOW.device != "cpu"):
            return forward(x)

    for layer in model.layers[:: toy(1, 4)] if planted("save-on-cpu") else ():  # PyTorch: costs copies over PCIe
        layer.mlp.forward = partial(offload, layer.mlp.forward)
    return training(model, partial(next_token_loss, model, ids))


def moe() -> Iterator[Tensor]:
    """A mixture of experts, in bf16."""
    model, ids = Transformer(4, 1536, 16_000, is_mixture=True), tokens(8, 1024, 16_000)
    return training(model, partial(next_token_loss, model, ids))


def compiled() -> Iterator[Tensor]:
    """Layers compiled one by one, in fp32 with autocast."""
    torch._dynamo.reset() if NOW.is_toy else None
    model, ids = Transformer(8, 1024, 16_000), tokens(24, 512, 16_000)
    for layer in model.layers:
        layer.compile(backend="aot_eager" if NOW.is_toy else "inductor", dynamic=False)
    if planted("head-outside-autocast"):  # PyTorch: by default, products in fp32 are without TF32
        model.head.forward = torch.autocast(NOW.device, enabled=False)(lambda x: F.linear(x.float(), model.head.weight))
    return training(model, partial(next_token_loss, model, ids))


def ddp() -> Iterator[Tensor]:
    """Images, whose model has a copy on each GPU; gradients of four parts are accumulated before they are reduced."""
    side, parts, rng = toy(32, 224), 4, np.random.default_rng(0)
    files = [zlib.compress(rng.integers(0, 255, (side, side, 3), np.uint8).tobytes(), 1) for _ in range(toy(4, 16))]
    model = Transformer(8, 2048, 1000, patch=768, core=attend)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    labels = torch.arange(len(files), device=NOW.device) % toy(256, 1000)

    def read() -> Tensor:
        images = []
        for pixels in files:
            image = np.frombuffer(zlib.decompress(pixels), np.uint8).reshape(side, side, 3).astype(np.float32) / 255
            image = (image - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
            images.append(image.reshape(side // 16, 16, side // 16, 16, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 768))
        batch = torch.from_numpy(np.stack(images))
        return batch if NOW.device == "cpu" else batch.pin_memory()

    def loss_of(batch: Tensor, part: int) -> Tensor:
        return F.cross_entropy(parallel(batch.chunk(parts)[part], 0).float(), labels.chunk(parts)[part]) / parts

    def look(weight: Tensor) -> None:  # Lightning: sync_dist=True for each metric
        for value in (weight.grad.norm(), weight.detach().norm()):
            dist.all_reduce(value, dist.ReduceOp.AVG if NOW.device != "cpu" else dist.ReduceOp.SUM)
            value.item()

    ready = read()  # PyTorch tuning guide: DataLoader(num_workers=4, pin_memory=True)
    return training(parallel, loss_of, look, lambda: read() if planted("decode-in-loop") else ready, parts)


def fsdp() -> Iterator[Tensor]:
    """Weights, gradients and states in shards; layers are checkpointed."""
    model, ids = Transformer(8, 2048, 16_000), tokens(4, 1024, 16_000)
    policy = MixedPrecisionPolicy(None if NOW.is_toy else torch.bfloat16, reduce_dtype=torch.float32)
    checkpointed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    for layer in model.layers:
        layer.forward = partial(checkpointed, layer.forward)
        layer.call = checkpointed if planted("nested-checkpoints") else layer.call  # HF, Megatron-LM: once is enough
    for part in (*model.layers, model):
        fully_shard(part, mp_policy=policy)
    loss_of = partial(next_token_loss, model, ids)
    return training(model, loss_of, lambda weight: float(weight.detach().full_tensor().norm()))  # FSDP2: gathers all


SERVING = dict(prefill=prefill, reranker=reranker, decode=decode, transcribe=decode, engine=engine, graphs=graphs)
PARALLEL = {"ddp": ddp, "fsdp": fsdp}  # two GPUs
PROGRAMS = {**SERVING, "gpt": gpt, "lora": lora, "moe": moe, "compiled": compiled, **PARALLEL}


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
    is_fp32 = NOW.is_toy or NOW.base in ("gpt", "compiled", "ddp", "fsdp")
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
    near, file = [stretch(name, steps, 0)], folder / f"near{rank}.json"
    file.write_text(json.dumps(near))
    with nullcontext() if NOW.device == "cpu" else torch.cuda.profiler.profile():
        run(name, steps, range(first, first + CAPTURED))
    near.append(stretch(name, steps, first + CAPTURED))
    file.write_text(json.dumps(near))
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
