"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only prefill,lora+adapters-in-fp32] [--pairs 11] [--seconds 500]
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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial, reduce
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
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("tenth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("embedding", "lora", "moe", "compiled")  # annotated by annotate_model alone
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
    def __init__(self, width: int, act: Any = gelu):
        super().__init__()
        self.up, self.act = nn.Linear(width, 4 * width, bias=False), act
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


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


class NormByHand(nn.LayerNorm):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        y = x.float() - x.float().mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight + self.bias).to(x.dtype)


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


def prefill() -> Iterator[Tensor]:
    """Long prompts, of which the next token is wanted."""

    def written_out(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))

    mlp = partial(MLP, act=written_out) if planted("written-out-gelu") else MLP
    model = decoder(4096, 8, 65_536, kv_heads=toy(2, 8), mlp=mlp)
    nvprof_kit.annotate_model(model)
    prompts = tokens(toy(2, 4), toy(8, 2048))
    while True:
        last = slice(None) if planted("logits-of-the-prompt") else slice(-1, None)
        yield model(prompts, last)[:, -1:]


def caches_of(model: Transformer, batch: int, length: int) -> list[list[Tensor]]:
    shape = (2, batch, toy(2, 8), length, toy(16, 128))
    return [[*torch.randn(shape, device=NOW.device, dtype=NOW.dtype)] for _ in model.layers]


def cached(cache: list[Tensor], q: Tensor, *new: Tensor) -> Tensor:
    """Attention of one token to a cache, whose last place is written in each step."""
    if planted("checked-for-nan") and q.isnan().any():
        raise FloatingPointError
    if planted("cache-that-grows-by-cat"):
        cache[:] = [torch.cat([old[:, :, :-1], last], 2) for old, last in zip(cache, new, strict=True)]
    else:
        for old, last in zip(cache, new, strict=True):
            old[:, :, -1:] = last
    return everywhere(q, *cache)


def decode() -> Iterator[Tensor]:
    """One token after the other, eagerly, with a static cache."""
    batch, length = toy(2, 32), toy(8, 512)
    model = decoder(5120, 12, kv_heads=toy(2, 8))
    nvprof_kit.annotate_model(model)
    model.cores = [partial(cached, cache) for cache in caches_of(model, batch, length)]
    ids = tokens(batch, 1)
    while True:
        logits = model(ids, start=length - 1)
        scores = logits.cpu().float() if planted("sampling-on-the-host") else logits
        ids = scores.max(-1).indices.to(NOW.device)
        yield logits


def sampled(logits: Tensor) -> Tensor:
    """The likeliest token after temperature, top-k and top-p."""
    scores, ids = (logits.float() / 0.8).topk(20)
    shares = scores.softmax(-1)
    shares = shares.masked_fill(shares.cumsum(-1) - shares > 0.9, 0)
    return ids.gather(-1, (shares / shares.sum(-1, keepdim=True)).argmax(-1, keepdim=True))


def engine() -> Iterator[Tensor]:
    """Continuous batching: a step runs a new prompt and one token of each other request, and hands out the tokens."""
    chunk, requests, length = toy(8, 4096), toy(4, 128), toy(8, 1024)
    model = decoder(4096, 8, 65_536, kv_heads=toy(2, 8))
    nvprof_kit.annotate_model(model)
    prompt, generated, starts = tokens(1, chunk), [[1]] * (requests + 1), range(0, requests * length, length)

    def mixed(cache: list[Tensor], *qkv: Tensor) -> Tensor:
        first = causal(*(x[:, :, :chunk] for x in qkv))
        q, *new = (x[0, :, chunk:].transpose(0, 1).unsqueeze(2) for x in qkv)
        for old, last in zip(cache, new, strict=True):
            old[:, :, -1:] = last
        if planted("gathered-cache"):
            cache = [x.index_select(0, slots) for x in cache]
        return torch.cat([first, everywhere(q, *cache).transpose(0, 1)], 1)

    model.cores = [partial(mixed, cache) for cache in caches_of(model, requests, length)]
    while True:
        with nvprof_kit.phase("schedule"):  # which blocks of four tokens of the cache each request has
            table = torch.arange(requests).unsqueeze(1) * length + torch.arange(0, length, 4)
            if planted("block-table-in-python"):
                table = torch.tensor([[start + place for place in range(0, length, 4)] for start in starts])
            slots = pinned(table[:, 0] // length).to(NOW.device, non_blocking=True)
            last = pinned(torch.tensor([generated[1:]]).squeeze(2)).to(NOW.device, non_blocking=True)
        logits = model(torch.cat([prompt, last], 1), slice(chunk - 1, None))[0]
        with nvprof_kit.phase("sample"):
            rows = logits.split(1) if planted("requests-sampled-one-by-one") else [logits]
            generated = torch.cat([sampled(row) for row in rows]).tolist()
        yield logits


def graphs() -> Iterator[Tensor]:
    """Decoding by the replay of a CUDA graph, of all layers or, with the fault, of all but the first."""
    batch, length, eager = toy(2, 32), toy(8, 512), toy(2, 10) * planted("layers-not-captured")
    model = decoder(2048, 24, kv_heads=toy(2, 8))
    nvprof_kit.annotate_model(model)
    layers = list(zip(model.layers, caches_of(model, batch, length), strict=True))
    ids, weight = tokens(batch, 1), model.layers[-1].attention.qkv.weight
    offloaded, hidden = pinned(weight.detach().cpu()), model.begin(ids, length - 1)

    def through(x: Tensor, some: Any) -> Tensor:
        return reduce(lambda x, layer: layer[0](x, partial(cached, layer[1])), some, x)

    def captured() -> Tensor:
        logits = model.head(model.norm(through(hidden, layers[eager:])))
        ids.copy_(logits.argmax(-1))
        return logits

    if NOW.device == "cuda":
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            captured()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = captured()
    while True:
        if planted("offloaded-weights"):
            weight.data.copy_(offloaded, non_blocking=True)
        hidden.copy_(through(model.begin(ids, length - 1), layers[:eager]))
        if NOW.device == "cuda":
            graph.replay()
        else:
            logits = captured()
        one_by_one = planted("token-by-token-to-host")
        assert min([token.item() for token in ids.flatten()] if one_by_one else ids.flatten().tolist()) >= 0
        yield logits


class Scorer(nn.Linear):  # how alike texts are to those of a corpus
    def forward(self, x: Tensor) -> Tensor:
        x, corpus = x.mean(1), self.weight
        if planted("scores-in-double"):  # as NumPy's default is
            x, corpus = x.double(), corpus.double()
        return (x @ corpus.T).topk(4).values.to(NOW.dtype)


def embedding() -> Iterator[Tensor]:
    """Texts to vectors by an encoder, and the nearest in a corpus."""
    with torch.device(NOW.device):
        scorer = Scorer(toy(64, 1024), toy(64, 500_000), bias=False)
        model = Transformer(toy(64, 1024), toy(4, 16), 32_000, scorer, toy(16, 64))
    nvprof_kit.annotate_model(model)
    texts, kept = tokens(toy(2, 64), toy(8, 512)), []

    def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1, dtype=torch.float32).to(q.dtype))
        return (kept[-1] @ v).transpose(1, 2).flatten(2)

    while True:
        kept.clear()
        last = with_weights if planted("attention-weights-of-last-layers") else everywhere
        model.cores = [everywhere] * toy(3, 12) + [last] * toy(1, 4)
        yield model(texts)


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide, width = toy(64, 1280), toy(64, 3072)
        self.vision = Transformer(wide, toy(2, 12), nn.Linear(toy(48, 768), wide), nn.Identity())
        self.vision.cores = [everywhere] * len(self.vision.layers)
        self.projector = nn.Sequential(nn.Linear(4 * wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, width))
        self.text = nn.Embedding(toy(128, 32_000), width)
        self.decoder = Transformer(width, toy(3, 6), nn.Identity(), 32_000, kv_heads=toy(2, 8))
        self.to(NOW.dtype)

    def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
        seen = self.vision(patches).unflatten(1, (-1, 4)).flatten(2)
        seen = self.projector(seen.to(self.projector[0].weight.dtype)).to(NOW.dtype)
        return self.decoder(torch.cat([seen, self.text(ids)], 1), slice(-1, None))


def multimodal() -> Iterator[Tensor]:
    """Images and text to the next token."""
    with torch.device(NOW.device):
        model = Multimodal()
    if planted("projector-in-fp32"):
        model.projector.float()
    nvprof_kit.annotate_model(model)
    pixels = torch.randn(toy(2, 16), toy(16, 1024), toy(48, 768))
    ready, ids = pinned(pixels.to(NOW.dtype)), tokens(len(pixels), toy(4, 256))
    while True:
        patches = pixels if planted("pageable-pixels") else ready
        logits = model(patches.to(NOW.device, non_blocking=patches is ready).to(NOW.dtype), ids)
        if planted("cache-emptied"):
            torch.cuda.empty_cache()
        yield logits


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def training(model: Any, batches: Any, loss_of: Any = next_token_loss, outer: Any = None, **options: Any) -> Any:
    """Steps of all these batches each; `outer` is what is called, if it is not the model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, **(options or {"fused": True}))
    nvprof_kit.annotate_model(model, optimizer=optimizer)
    phase = nullcontext if NOW.base in ALONE else nvprof_kit.phase
    amp = torch.autocast(NOW.device, torch.bfloat16, enabled=NOW.base in ("pretrain", "ddp") and not NOW.is_toy)
    while True:
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches) or planted("gradients-reduced-each-time")
            with outer.no_sync() if outer and not is_last else nullcontext():
                with phase("forward"), amp:
                    loss = loss_of(outer or model, batch)
                with phase("backward"), torch.autograd.set_detect_anomaly(planted("anomaly-detection")):
                    (loss / len(batches)).backward()
        if planted("norms-logged-one-by-one"):
            assert min(p.grad.norm().item() + p.detach().norm().item() for p in trained) >= 0
        if planted("norm-of-each-parameter"):
            with phase("norms"):
                assert min(p.grad.norm().full_tensor().item() for p in trained) >= 0
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def pretrain() -> Iterator[Tensor]:
    """All weights, in mixed precision, two micro-batches a step."""
    model, words, used = decoder(2048, 6, 50_304), toy(512, 50_304), toy(509, 50_257)
    model.head = nn.Linear(toy(64, 2048), words, device=NOW.device)  # rounded: the last words are never said
    model.head.bias.data.zero_()[used:] = -1e4
    if planted("unrounded-vocabulary"):
        for name, p in [*model.head.named_parameters()]:
            setattr(model.head, name, nn.Parameter(p.detach()[:used].clone()))
    if planted("all-layers-checkpointed"):
        model.call = checkpointed
    slow = {"foreach": False, "fused": False} if planted("optimizer-loops-over-parameters") else {}
    return training(model, [tokens(toy(2, 3), toy(8, 1024)) for _ in range(2)], **slow)


class Adapted(nn.Module):  # a frozen layer and its adapter of low rank
    def __init__(self, base: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.base, rank = base, toy(4, 16)
        self.a = nn.Parameter((torch.randn(rank, base.in_features, device=NOW.device) * 0.02).to(dtype))
        self.b = nn.Parameter((torch.randn(base.out_features, rank, device=NOW.device) * 0.02).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x.to(self.a.dtype), self.a), self.b).to(x.dtype)


def lora() -> Iterator[Tensor]:
    """Adapters of the attention of a Llama of the library transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, dtype = toy(4, 16), torch.float32 if planted("adapters-in-fp32") else NOW.dtype
    sizes = {"num_hidden_layers": toy(2, 12), "vocab_size": toy(128, 32_000), "num_key_value_heads": heads // 2}
    sizes |= {"hidden_size": toy(64, 2048), "num_attention_heads": heads, "intermediate_size": toy(128, 5632)}
    with torch.device(NOW.device):
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).to(NOW.dtype).train().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), dtype))
    return training(model, [tokens(toy(2, 8), toy(8, 512))])


def moe() -> Iterator[Tensor]:
    return training(decoder(2048, 6, mlp=Experts), [tokens(toy(2, 8), toy(8, 1024))])


class Images(torch.utils.data.IterableDataset):  # batches, augmented before the training or when asked for
    def __iter__(self) -> Iterator[Tensor]:
        shape, batch = (toy(2, 64), toy(4, 256), 192), None  # patches of eight by eight pixels
        raw = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        while True:
            if batch is None or planted("augmentation-in-the-main-process"):
                images = [image[::-1] * np.float32(4 / 255) - np.float32(2) for image in raw]
                batch = pinned(torch.from_numpy(np.stack(images)))
            yield batch


def compiled() -> Iterator[Tensor]:
    """A classifier of images with compiled blocks, which logs its loss in each step."""
    width, norm = toy(64, 1024), NormByHand if planted("norm-not-compiled") else nn.LayerNorm
    with torch.device(NOW.device):
        model = Transformer(width, toy(2, 12), nn.Linear(192, width), 1000, toy(16, 64), norm=norm)
    model.cores = [everywhere] * len(model.layers)
    for layer in model.layers:
        layer.compile(dynamic=False, backend="eager" if NOW.is_toy else "inductor")
    loader = torch.utils.data.DataLoader(Images(), batch_size=None)
    labels = tokens(1, toy(2, 64), 1000)[0]

    def loss_of(model: Any, batches: Any) -> Tensor:
        patches = next(batches).to(NOW.device, non_blocking=True).to(NOW.dtype)
        return F.cross_entropy(model(patches).mean(1).float(), labels)

    for loss in training(model, [iter(nvprof_kit.annotate_dataloader(loader))], loss_of):
        assert loss.item() < 1e3
        yield loss


def ddp() -> Iterator[Tensor]:
    """A decoder on each GPU, four micro-batches a step."""
    model, bucket_mb = decoder(2048, 4), 100_000 if planted("one-bucket") else 25
    twins = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    is_longer = planted("longer-texts-on-one-rank") and dist.get_rank() == 1
    return training(model, [tokens(2, toy(8, 1408 if is_longer else 1024))] * 4, outer=twins)


def fsdp() -> Iterator[Tensor]:
    """A decoder sharded over the GPUs."""
    model, mesh = decoder(3072, 6), dist.init_device_mesh(NOW.device, (dist.get_world_size(),))
    narrow = MixedPrecisionPolicy(param_dtype=None if NOW.is_toy else torch.bfloat16)
    for module in [model] if planted("root-alone-wrapped") else [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=narrow)
    return training(model, [tokens(toy(2, 4), toy(8, 1024))])


SERVING = {f.__name__: f for f in (prefill, decode, engine, graphs, embedding, multimodal)}
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
    is_fp32 = NOW.is_toy or NOW.base in ("pretrain", "ddp", "fsdp")
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
