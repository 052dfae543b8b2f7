"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only mixed,listen+gelu-written-out] [--pairs 11] [--seconds 500]
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
from functools import partial
from itertools import count
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("twelfth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("paint",)  # annotated by annotate_model alone
NOW = argparse.Namespace(device="cuda", dtype=None, is_toy=False, base="", fault="", is_met=False)  # what runs now


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
    def __init__(self, width: int, size: int, kv_heads: int = 0):
        super().__init__()
        self.size, self.parts = size, [width, *[kv_heads * size or width] * 2]
        self.qkv, self.out = nn.Linear(width, sum(self.parts), bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, core: Any, heard: Tensor | None = None) -> Tensor:
        if heard is not None:
            of_x, of_heard = self.qkv.weight.split([self.parts[0], 2 * self.parts[1]])
            qkv = F.linear(x, of_x), *F.linear(heard, of_heard).chunk(2, -1)
        elif planted("a-product-for-each-head"):
            each = [F.linear(x, weight) for weight in self.qkv.weight.split(self.size)]
            qkv = torch.cat(each, -1).split(self.parts, -1)
        else:
            qkv = self.qkv(x).split(self.parts, -1)
        y = core(*(part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in qkv))
        return self.out(y.to(self.out.weight.dtype)).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, act: Any = gelu) -> Tensor:
        if planted("mlp-in-slices"):
            return torch.cat([self.down(act(self.up(part))) for part in x.flatten(0, 1).split(toy(8, 256))]).view_as(x)
        return self.down(act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, *options: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, *options), MLP(width)

    def forward(self, x: Tensor, core: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), core)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Of tokens, or of what a module embeds, to logits or to what another module makes of the last layer's."""

    def __init__(self, width: int, layers: int, embed: Any, head: Any, *options: int, block: Any = Block):
        super().__init__()
        with torch.device(NOW.device):
            self.embed = nn.Embedding(toy(128, embed), width) if isinstance(embed, int) else embed
            self.places = nn.Embedding(toy(32, 8192), width)
            self.layers = nn.ModuleList(block(width, *options) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, toy(128, head), bias=False) if isinstance(head, int) else head
        self.cores = [causal] * layers
        self.to(NOW.device, NOW.dtype)

    def forward(self, x: Tensor, rows: Any = slice(None), places: Any = slice(None), given: Any = ()) -> Tensor:
        x = self.embed(x)
        x = x + self.places.weight[slice(x.shape[1]) if isinstance(places, slice) else places]
        for layer, core in zip(self.layers, self.cores, strict=True):
            x = layer(x, core, *given)
        x = self.norm(x[:, rows])
        if planted("head-cast-for-each-token"):
            return F.linear(x.float(), self.head.weight.float())
        return self.head(x)


def decoder(width: int, layers: int, texts: int, length: int, words: int = 32_000) -> tuple[Transformer, Tensor]:
    """A decoder with grouped queries, and a cache for so many texts of that length."""
    model = Transformer(toy(64, width), toy(2, layers), words, words, toy(16, 128), toy(2, 8))
    nvprof_kit.annotate_model(model)
    cache = torch.randn(toy(2, layers), 2, texts, toy(2, 8), length, toy(16, 128), device=NOW.device)
    return model, cache.to(NOW.dtype)


def kept(cache: Tensor, core: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache[0].copy_(k), cache[1].copy_(v)
    return core(q, k, v)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@torch.no_grad()
def prompts() -> Iterator[Tensor]:
    """Two long prompts, each answered by a token."""
    ids = tokens(2, toy(32, 4096))
    model, caches = decoder(4096, 4, *ids.shape)
    model.cores = [partial(kept, cache, causal) for cache in caches]
    if planted("attention-of-the-last-layer-written-out"):
        model.cores[-1] = partial(kept, caches[-1], written_out)
    while True:
        with nvprof_kit.phase("prefill"):
            logits = model(ids, slice(-1, None))
        yield logits


def ring(cache: Tensor, slot: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a token to all that a ring holds, when it holds the token too."""
    for held, new in zip(cache, (k, v), strict=True):
        if planted("cache-written-by-where"):
            is_here = torch.arange(held.shape[2], device=slot.device) == slot
            torch.where(is_here.unsqueeze(1), new, held, out=held)
        else:
            held.index_copy_(2, slot, new)
    if planted("heads-repeated-for-decoding"):
        cache = cache.repeat_interleave(q.shape[1] // k.shape[1], 2)
    return everywhere(q, *cache)


@torch.no_grad()
def replay() -> Iterator[Tensor]:
    """Ten tokens for each of 32 texts, with rings of what was last; a token is a graph."""
    batch, length = toy(2, 32), toy(8, 768)
    model, caches = decoder(4096, 8, batch, length, 65_536)
    last, slot = tokens(batch, 1), torch.tensor([length // 2], device=NOW.device)
    model.cores = [partial(ring, cache, slot) for cache in caches]
    answers, over = torch.zeros(batch, toy(3, 10), dtype=torch.int64, device=NOW.device), [False] * batch

    def token() -> None:
        last.copy_(model(last, places=slot)[:, -1].argmax(-1, keepdim=True))
        slot.add_(1).remainder_(length)

    again = token
    if NOW.device == "cuda":
        token()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            token()
        again = graph.replay
    while True:
        with nvprof_kit.phase("decode"):
            for number in range(answers.shape[1]):
                again()
                answers[:, number] = last[:, 0]
                if planted("each-text-asked-for-its-end"):
                    over = [is_over | (text.item() == 2) for is_over, text in zip(over, last, strict=True)]
        yield answers.clone()


def of_both(cache: Tensor, slot: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a prompt's first tokens, and of one token for each of other texts."""
    parts = (part.split([part.shape[2] - cache.shape[1], cache.shape[1]], 2) for part in (q, k, v))
    prompt, others = zip(*parts, strict=True)
    decoded = ring(cache, slot, *(part.transpose(0, 2) for part in others))
    return torch.cat([causal(*prompt), decoded.transpose(0, 1)], 1)


@torch.no_grad()
def mixed() -> Iterator[Tensor]:
    """Steps of an engine: the first chunk of a prompt, and a token for each of 64 requests."""
    chunk, requests, words = toy(16, 3008), toy(4, 64), toy(128, 32_000)
    model, caches = decoder(5120, 5, requests, toy(8, 1024))
    ids, slot = tokens(1, chunk + requests), torch.tensor([toy(5, 700)], device=NOW.device)
    model.cores = [partial(of_both, cache, slot) for cache in caches]
    places = torch.cat([torch.arange(chunk, device=NOW.device), slot.expand(requests)])
    rows = 0 if planted("logits-of-the-whole-chunk") else chunk - 1
    on_host = planted("sampled-in-numpy")
    penalties = torch.zeros(requests + 1, words, device="cpu" if on_host else NOW.device)
    shares = penalties.numpy().copy() if on_host else np.empty(0)
    while True:
        with nvprof_kit.phase("forward"):
            scores = model(ids, slice(rows, None), places)[0, -requests - 1 :].float()
        with nvprof_kit.phase("sample"):
            if on_host:
                torch.from_numpy(shares).copy_(scores)
                shares -= penalties.numpy()
                shares -= shares.max(-1, keepdims=True)
                np.exp(shares, out=shares)
                shares /= shares.sum(-1, keepdims=True)
                chosen = torch.from_numpy(shares.argmax(-1, keepdims=True))
            else:
                chosen = (scores - penalties).softmax(-1).argmax(-1, keepdim=True)
            penalties.scatter_add_(1, chosen, torch.full_like(chosen, 0.1, dtype=torch.float32))
            ids[0, chunk:] = chosen[1:, 0].to(NOW.device)
        yield scores


class Texts(IterableDataset[Tensor]):  # of which each word is looked up
    def __iter__(self) -> Iterator[Tensor]:
        random, words = np.random.default_rng(0), toy(28, 65_280)
        known = np.sort(random.integers(2**62, size=toy(128, 32_768)))
        while True:
            yield torch.from_numpy(np.searchsorted(known, random.choice(known, words)))


@torch.no_grad()
def rerank() -> Iterator[Tensor]:
    """Scores of 128 pairs of a query and a passage, which lie one after the other."""
    batch, width, size = toy(4, 128), toy(64, 1024), toy(16, 64)
    lengths = torch.tensor([toy(4 + 2 * number, 256 + 4 * (number * 37 % 128)) for number in range(batch)])
    ends, longest = F.pad(lengths.cumsum(0), (1, 0)).to(NOW.device, torch.int32), int(lengths.max())
    places = torch.cat([torch.arange(int(length)) for length in lengths]).to(NOW.device)
    slots = torch.arange(batch).repeat_interleave(lengths).to(NOW.device) * longest + places
    mask = torch.zeros(batch * longest, dtype=torch.bool, device=NOW.device).index_fill_(0, slots, True)

    def padded(x: Tensor) -> Tensor:
        whole = x.new_zeros(batch * longest, x.shape[1], size).index_copy_(0, slots, x[0].transpose(0, 1))
        return whole.unflatten(0, (batch, longest)).transpose(1, 2)

    def core(*qkv: Tensor) -> Tensor:
        if planted("padded-around-attention"):
            y = F.scaled_dot_product_attention(*map(padded, qkv), mask.view(batch, 1, 1, longest))
            return y.transpose(1, 2).flatten(0, 1)[slots].flatten(1).unsqueeze(0)
        if NOW.device == "cpu":
            texts = zip(*(part.split(lengths.tolist(), 2) for part in qkv), strict=True)
            return torch.cat([everywhere(*text) for text in texts], 1)
        bounds, parts = (ends, ends, longest, longest), (part[0].transpose(0, 1) for part in qkv)
        return torch.ops.aten._flash_attention_forward(*parts, *bounds, 0.0, False, False)[0].flatten(1).unsqueeze(0)

    model = Transformer(width, toy(2, 7), 32_768, nn.Linear(width, 1, device=NOW.device), size)
    model.cores = [core] * len(model.layers)
    options = {} if planted("loaded-in-the-loop") else {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(Texts(), batch_size=None, pin_memory=NOW.device == "cuda", **options)
    for ids in nvprof_kit.annotate_model(model, dataloader=loader).dataloader:
        with nvprof_kit.phase("forward"):
            scores = model(ids.to(NOW.device, non_blocking=True).unsqueeze(0), ends[:-1], places)
        with nvprof_kit.phase("answer"):
            answer = scores.float().cpu()
        yield answer


def gelu_written_out(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3))))


class Crossed(Block):  # between its attention and its MLP it attends to what was heard
    def __init__(self, width: int, size: int):
        super().__init__(width, size)
        self.norm3, self.cross = nn.LayerNorm(width), Attention(width, size)

    def forward(self, x: Tensor, core: Any, heard: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), core)
        x = x + self.cross(self.norm3(x), everywhere, heard)
        return x + self.mlp(self.norm2(x), gelu_written_out if planted("gelu-written-out") else gelu)


class Listener(nn.Module):  # from features of speech, and what was said before, to the next token
    def __init__(self, features: int, width: int, size: int):
        super().__init__()
        stem = nn.Linear(features, width, device=NOW.device)
        self.encoder = Transformer(width, toy(2, 4), stem, nn.Identity(), size)
        self.encoder.cores = [everywhere] * len(self.encoder.layers)
        self.decoder = Transformer(width, toy(2, 4), 51_840, 51_840, size, block=Crossed)

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        return self.decoder(ids, slice(-1, None), given=(self.encoder(features),))


@torch.no_grad()
def listen() -> Iterator[Tensor]:
    """The next token for each of 32 pieces of speech; their features come from the host, a step ahead."""
    model, ids = Listener(toy(16, 160), toy(64, 1280), toy(16, 64)), tokens(toy(2, 32), toy(8, 448))
    nvprof_kit.annotate_model(model)
    if planted("cross-output-in-float32"):
        for layer in model.decoder.layers:
            layer.cross.out.float()
    is_late = planted("features-not-pinned")
    pieces = list(torch.randn(2, len(ids), toy(12, 1500), toy(16, 160)))
    pieces = pieces if is_late else [*map(pinned, pieces)]
    sent = [piece.to(NOW.device) for piece in pieces]
    side = None if is_late or NOW.device == "cpu" else torch.cuda.Stream()
    for number in count():
        with nvprof_kit.phase("features"):
            if side:
                side.wait_stream(torch.cuda.current_stream())
                torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.stream(side):
                coming = (number if is_late else number + 1) % 2
                sent[coming].copy_(pieces[coming], non_blocking=True)
        with nvprof_kit.phase("forward"):
            logits = model(sent[number % 2].to(NOW.dtype), ids)
        yield logits


class Modulated(Block):  # its norms are moved and its parts gated, as a condition and a level of noise say
    def __init__(self, width: int, size: int):
        super().__init__(width, size)
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.moments = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, core: Any, given: Tensor, level: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.moments(given).unsqueeze(1).chunk(6, -1)
        y = torch.addcmul(shift1, self.norm1(x), 1 + level * scale1).to(x.dtype)
        x = torch.addcmul(x, gate1, self.attention(y, core))
        y = torch.addcmul(shift2, self.norm2(x), 1 + level * scale2).to(x.dtype)
        return torch.addcmul(x, gate2, self.mlp(y))


@torch.no_grad()
def paint() -> Iterator[Tensor]:
    """Denoises eight images, with guidance: each once of its kind, once of none."""
    images, length, patch, width = toy(2, 8), toy(16, 1024), toy(8, 64), toy(64, 1536)
    parts = nn.Linear(patch, width, device=NOW.device), nn.Linear(width, patch, device=NOW.device)
    model = Transformer(width, toy(3, 12), *parts, toy(16, 64), block=Modulated)
    model.cores = [everywhere] * len(model.layers)
    if planted("attention-upcast-in-a-layer"):
        model.cores[len(model.layers) // 2] = lambda *qkv: everywhere(*(part.float() for part in qkv)).to(NOW.dtype)
    nvprof_kit.annotate_model(model)
    is_double = planted("levels-as-numpy-made-them")
    levels = torch.from_numpy(np.linspace(1, 0.02, 50)).to(NOW.device, None if is_double else NOW.dtype)
    noisy = torch.randn(images, length, patch, device=NOW.device).to(NOW.dtype)
    given = torch.randn(2 * images, width, device=NOW.device).to(NOW.dtype)
    for number in count():
        of_kind, of_none = model(noisy.repeat(2, 1, 1), given=(given, levels[number % 50].view(1, 1, 1))).chunk(2)
        noisy = noisy - 0.02 * torch.lerp(of_none, of_kind, 3.0)
        yield noisy


PARALLEL: dict[str, Any] = {}  # two GPUs
PROGRAMS = {"prompts": prompts, "replay": replay, "mixed": mixed, "rerank": rerank, "listen": listen, "paint": paint}


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
    is_fp32 = NOW.is_toy or NOW.base in PARALLEL
    NOW.dtype = torch.float32 if is_fp32 else torch.bfloat16
    torch.manual_seed(0)
    if NOW.base in PARALLEL and not dist.is_initialized():
        rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if NOW.device == "cpu" else "cpu:gloo,cuda:nccl", **rendezvous)
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
