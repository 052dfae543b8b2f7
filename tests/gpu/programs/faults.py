"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only adapt,choosers+gelu-by-hand] [--pairs 11] [--seconds 500]
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
import itertools
import json
import lzma
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("thirteenth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("adapt",)  # annotated by annotate_model alone
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
adam = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class Attention(nn.Module):
    def __init__(self, width: int, core: Any = causal, kv_heads: int = 0, linear: Any = nn.Linear):
        super().__init__()
        self.size, self.core = toy(16, 128), core
        self.parts = [width, *[kv_heads * self.size or width] * 2]
        self.qkv, self.out = linear(width, sum(self.parts), bias=False), linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.parts, -1)
        return self.out(self.core(*(part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int = 0, act: Any = gelu, up: Any = nn.Linear, down: Any = nn.Linear):
        super().__init__()
        hidden, self.act = hidden or 4 * width, act
        self.up = up(width, 2 * hidden if act is F.glu else hidden, bias=False)
        self.down = down(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):  # of what is embedded, to what the head makes of all vectors, of some, or of their means
    def __init__(self, width: int, layers: int, embed: Any, head: Any, *mlps: Any, **attention: Any):
        super().__init__()
        self.embed, self.places = embed, nn.Embedding(toy(32, 4096), width)
        parts = ((Attention(width, **attention), mlps[i % len(mlps)](width)) for i in range(layers))
        self.layers = nn.ModuleList(Block(width, *part) for part in parts)
        self.norm, self.head = nn.LayerNorm(width), head
        self.to(NOW.device, NOW.dtype)

    def forward(self, x: Tensor, rows: Tensor | None = None, is_pooled: bool = False) -> Tensor:
        x = self.embed(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if planted("layers-checkpointed") else layer(x)
        x = self.norm(x if rows is None else x.flatten(0, 1).index_select(0, rows))
        return self.head(x.mean(1) if is_pooled else x)


def next_token_loss(model: Any, ids: Tensor, words: int | None = None) -> Tensor:
    return F.cross_entropy(model(ids)[..., :words].flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def clip(parameters: list[Tensor]) -> None:
    grads = [p.grad for p in parameters]
    if planted("clipped-in-fp32"):
        total = torch.stack([grad.float().norm() for grad in grads]).norm()
        scale = (1.0 / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.copy_(grad.float() * scale)
    elif planted("clipped-in-float64"):
        total = torch.stack([grad.double().pow(2).sum() for grad in grads]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total.to(grads[0].dtype))
    else:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)


def training(model: Any, batches: Any, loss_of: Any, *optimizers: Any, outer: Any = None, clips: Any = False) -> Any:
    """Steps of all these batches each; `outer` is what is called, if it is not the model."""
    nvprof_kit.annotate_model(model, optimizer=optimizers[0] if NOW.base in ALONE else None)
    phase = nullcontext if NOW.base in ALONE else nvprof_kit.phase
    while True:
        total = torch.zeros((), device=NOW.device)
        for number, batch in enumerate(batches, 1):
            with outer.no_sync() if outer and number < len(batches) else nullcontext():
                with phase("forward"):
                    loss = loss_of(outer or model, batch) / len(batches)
                with phase("backward"):
                    loss.backward()
            total += loss.detach()
        if clips:
            with phase("clip"):
                clip([*model.parameters()])
        with phase("optimizer"):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        yield total


def orthogonal(update: Tensor) -> Tensor:
    """Nearly the nearest matrix whose singular values are equal, by five steps of Newton and Schulz."""
    x = update.float() if planted("orthogonalised-in-fp32") else update.to(NOW.dtype)
    x = x.T if len(x) > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        alike = x @ x.T
        x = torch.addmm(x, torch.addmm(alike, alike, alike, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x if x.shape == update.shape else x.T).to(update.dtype)


class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p not in self.state:
                self.state[p]["momentum"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
            p.add_(orthogonal(momentum), alpha=-self.defaults["lr"])


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1, dtype=torch.float32).to(v.dtype), v).flatten(2)


def masked() -> Iterator[Tensor]:
    """An encoder of texts, of which it guesses every seventh word; Muon trains its matrices."""
    torch.set_float32_matmul_precision("high")
    width, words, (batch, length) = toy(64, 1536), toy(128, 32_768), (toy(2, 16), toy(16, 1024))
    with torch.device(NOW.device):
        embed, head = nn.Embedding(words + 1, width), nn.Linear(width, words, bias=False)
        model = Tower(
            width, toy(2, 4), embed, head, MLP, core=by_einsum if planted("attention-by-einsum") else everywhere
        )
        hidden = torch.randperm(batch * length)[: batch * length // 7]
    ids = tokens(batch, length, words).flatten()
    labels = torch.full_like(ids, -100).index_copy(0, hidden, ids[hidden])
    texts = ids.index_fill(0, hidden, words).view(batch, length)

    def loss_of(model: Any, texts: Tensor) -> Tensor:
        if planted("unmasked-words-guessed"):
            return F.cross_entropy(model(texts).flatten(0, 1).float(), labels)
        return F.cross_entropy(model(texts, hidden).float(), ids[hidden])

    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [*{*model.parameters()}.difference(matrices)]
    return training(model, [texts], loss_of, Muon(matrices, {"lr": 1e-3}), adam(others))


class Frozen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Adapted(Frozen):  # and a product of low rank, which is trained
    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)
        self.inner = nn.Parameter(torch.randn(toy(4, 16), inputs) * inputs**-0.5)
        self.outer = nn.Parameter(torch.randn(outputs, toy(4, 16)) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        if planted("adapters-in-fp32"):
            y = super().forward(x)
            return (y + F.linear(F.linear(x.to(self.inner.dtype), self.inner), self.outer)).to(y.dtype)
        rows = x.flatten(0, 1)
        y = super().forward(rows).addmm_(F.linear(rows, self.inner), self.outer.T)
        return y.unflatten(0, x.shape[:2])


def adapt() -> Iterator[Tensor]:
    """Adapters of low rank in a frozen decoder, four micro-batches a step."""
    width, words, kv_heads = toy(64, 4096), toy(128, 32_000), toy(2, 8)
    mlp = partial(MLP, hidden=toy(128, 14_336), act=F.glu, up=Frozen, down=Adapted)
    with torch.device(NOW.device):
        embed, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        model = Tower(width, toy(2, 3), embed, head, mlp, kv_heads=kv_heads, linear=Adapted)
    for name, p in model.named_parameters():
        p.requires_grad_(is_adapter := name.endswith(("inner", "outer")))
        if planted("adapters-in-fp32" if is_adapter else "base-weights-in-fp32") and name.startswith("layers"):
            p.data = p.data.float() if p.ndim == 2 else p.data
    return training(model, tokens(toy(4, 8), toy(8, 768)).chunk(4), next_token_loss, adam(model.parameters()))


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Choosers(nn.Module):  # experts, each of which chooses as many tokens as the others do
    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, experts := toy(4, 32), bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * width**-0.5 / 2)

    def forward(self, x: Tensor) -> Tensor:
        flat, experts = x.flatten(0, 1), len(self.up)
        shares, chosen = self.router(flat).float().softmax(-1).T.topk(2 * len(flat) // experts)
        y = torch.bmm(flat.index_select(0, chosen.flatten()).unflatten(0, chosen.shape), self.up)
        y = gelu_by_hand(y) if planted("gelu-by-hand") else gelu(y)
        y = torch.bmm(y, self.down) * shares.unsqueeze(2).to(y.dtype)
        return torch.zeros_like(flat).index_add_(0, chosen.flatten(), y.flatten(0, 1)).view_as(x)


def fed(batches: list[Tensor]) -> Iterator[Tensor]:
    """Each batch in turn, copied to the GPU while the step before runs."""
    side = (gpu := torch.get_device_module(NOW.device)).Stream()

    def copy(batch: Tensor) -> Tensor:
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            return batch.to(NOW.device, non_blocking=True)

    ahead = copy(batches[-1])
    for batch in itertools.cycle(batches):
        gpu.current_stream().wait_stream(side)
        now, ahead = ahead, copy(batch)
        yield now


def choosers() -> Iterator[Tensor]:
    """Classes of images, by a mixture of experts in every second layer."""
    width, batch, sizes, classes = toy(64, 1024), toy(4, 128), (toy(9, 196), toy(48, 768)), toy(16, 1024)
    with torch.device(NOW.device):
        embed, head = nn.Linear(sizes[1], width), nn.Linear(width, classes)
        model = Tower(width, toy(2, 4), embed, head, MLP, Choosers, core=everywhere)
        labels = torch.randint(classes, (batch,))
    images = [torch.randn(batch, *sizes) for _ in range(2)]
    feed = fed(images if planted("images-not-pinned") else [pinned(batch) for batch in images])

    def loss_of(model: Any, feed: Iterator[Tensor]) -> Tensor:
        with nvprof_kit.phase("data"):
            images = next(feed)
        return F.cross_entropy(model(images.to(NOW.dtype), is_pooled=True).float(), labels)

    return training(model, [feed], loss_of, adam(model.parameters()), clips=True)


@cache
def captions() -> Tensor:
    """The vectors of all texts, which another model has made."""
    generator = torch.Generator(NOW.device).manual_seed(0)
    return torch.randn(toy(64, 1_500_000), toy(16, 1024), generator=generator, device=NOW.device, dtype=NOW.dtype)


class Locked(Tower):  # images to the vectors of their texts, which are not trained
    def forward(self, patches: Tensor, chosen: Tensor) -> Tensor:
        texts = self.captions.index_select(0, chosen)
        return F.normalize(super().forward(patches, is_pooled=True).float(), dim=-1) @ texts.float().T


def ddp() -> Iterator[Tensor]:
    """A tower of images on each GPU, two micro-batches a step, of small images and of large ones."""
    rank, ranks, width = dist.get_rank(), dist.get_world_size(), toy(64, 4096)
    with torch.device(NOW.device):
        embed, head = nn.Linear(toy(48, 768), width), nn.Linear(width, toy(16, 1024))
        model = Locked(width, toy(2, 8), embed, head, MLP, core=everywhere)
        model.register_buffer("captions", captions(), persistent=False)
        chosen = torch.randint(len(captions()), (toy(32, 4096),))
        sizes = [toy(4, 128)] * ranks + [toy(8, 256)] * ranks
        lots = [torch.randn(toy(2, 5), size, toy(48, 768), dtype=NOW.dtype) for size in sizes]
    lots = lots[2 * rank : 2 * rank + 2] if planted("in-order-of-size") else lots[rank::ranks]
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": planted("captions-broadcast")}
    outer = nn.parallel.DistributedDataParallel(model, **options)

    def loss_of(model: Any, patches: Tensor) -> Tensor:
        return F.cross_entropy(10 * model(patches, chosen), torch.arange(len(patches), device=NOW.device))

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    return training(model, lots, loss_of, optimizer, outer=outer, clips=True)


def fsdp() -> Iterator[Tensor]:
    """A decoder sharded over the GPUs, of a vocabulary that is padded."""
    width, words, padded = toy(64, 2560), toy(125, 50_257), toy(128, 50_304)
    mesh = dist.init_device_mesh(NOW.device, (dist.get_world_size(),))
    with torch.device(NOW.device):
        embed, head = nn.Embedding(padded, width), nn.Linear(width, padded, bias=False)
        if planted("vocabulary-not-padded"):
            head.weight = nn.Parameter(head.weight[:words].clone())
        model = Tower(width, toy(2, 10), embed, head, MLP)
    narrow = MixedPrecisionPolicy(None if NOW.is_toy else torch.bfloat16, torch.float32)
    for module in [model] if planted("sharded-as-one") else [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=narrow)

    loss_of = partial(next_token_loss, words=words)
    return training(model, [tokens(toy(2, 4), toy(8, 1024), words)], loss_of, adam(model.parameters()))


PARALLEL = {"ddp": ddp, "fsdp": fsdp}  # two GPUs
PROGRAMS = {"masked": masked, "adapt": adapt, "choosers": choosers, **PARALLEL}


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
    is_fp32 = NOW.is_toy or NOW.base == "fsdp"
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
