"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only gpt,tune+one-hot-embedding] [--pairs 11] [--seconds 500]
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
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, SubprocessError
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("eleventh\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("tune", "experts")  # annotated by annotate_model alone
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


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp

    def forward(self, x: Tensor, core: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), core)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Of tokens, or of what a module embeds, to logits or to what another module makes of the last layer's."""

    def __init__(self, width: int, layers: int, embed: Any, head: Any, size: Any = None, **options: Any):
        super().__init__()
        size, mlp, kv_heads = size or toy(16, 128), *map(options.get, ("mlp", "kv_heads"))
        self.embed = nn.Embedding(toy(128, embed), width) if isinstance(embed, int) else embed
        self.places = nn.Embedding(toy(32, 8192), width)
        parts = ((Attention(width, size, kv_heads or 0), (mlp or MLP)(width)) for _ in range(layers))
        self.layers = nn.ModuleList(Block(width, *part) for part in parts)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, toy(128, head), bias=False) if isinstance(head, int) else head
        self.cores = [causal] * layers
        self.to(NOW.device, NOW.dtype)

    def begin(self, x: Tensor, start: int = 0) -> Tensor:
        return self.embed(x) + self.places.weight[start : start + x.shape[1]]

    def forward(self, x: Tensor, rows: slice = slice(None), start: int = 0) -> Tensor:
        x = self.begin(x, start)
        for layer, core in zip(self.layers, self.cores, strict=True):
            x = layer(x, core)
        return self.head(self.norm(x[:, rows]))


def decoder(width: int, layers: int, words: int = 32_000, **options: Any) -> Transformer:
    with torch.device(NOW.device):
        return Transformer(toy(64, width), toy(4, layers), words, words, **options)


def next_token_loss(model: Any, ids: Tensor) -> list[Tensor]:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return [F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())]


def training(model: Any, batches: Any, loss_of: Any = next_token_loss, outer: Any = None, **options: Any) -> Any:
    """Steps of all these batches each; `outer` is what is called, if it is not the model."""
    trained = options.pop("trained", None) or [*model.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, **(options or {"fused": True}))
    nvprof_kit.annotate_model(model, optimizer=optimizer)
    phase = nullcontext if NOW.base in ALONE else nvprof_kit.phase
    amp = torch.autocast(NOW.device, torch.bfloat16, enabled=NOW.base in ("gpt", "ddp") and not NOW.is_toy)
    while True:
        sums = []
        for number, batch in enumerate(batches, 1):
            with outer.no_sync() if outer and number < len(batches) else nullcontext():
                with phase("forward"), amp:
                    losses = loss_of(outer or model, batch)
                with phase("backward"):
                    for loss in losses:
                        (loss / len(batches)).backward(retain_graph=len(losses) > 1)
                sums += [loss.detach() for loss in losses]
        optimizer.step()
        if planted("weights-averaged-each-step"):
            with phase("synchronize"):
                for p in trained:
                    dist.all_reduce(p.data)
                    p.data /= dist.get_world_size()
        optimizer.zero_grad(set_to_none=not planted("zero-filled-gradients"))
        yield torch.stack(sums).sum() / len(batches)


def gpt() -> Iterator[Tensor]:
    """All weights, in mixed precision, two micro-batches a step."""
    model, texts = decoder(3072, 4), tokens(4, toy(8, 768))
    return training(model, texts.chunk(4 if planted("micro-batches-too-small") else 2))


class OneHotEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, self.num_embeddings).to(self.weight.dtype) @ self.weight


def tune() -> Iterator[Tensor]:
    """All weights of a Mistral of the library transformers, in bfloat16."""
    from transformers import MistralConfig, MistralForCausalLM

    heads, words = toy(4, 32), toy(128, 65_536)
    sizes = {"num_hidden_layers": toy(2, 3), "vocab_size": words, "num_key_value_heads": heads // 4}
    sizes |= {"hidden_size": toy(64, 4096), "num_attention_heads": heads, "intermediate_size": toy(128, 8192)}
    with torch.device(NOW.device):
        model = MistralForCausalLM(MistralConfig(**sizes, use_cache=False, sliding_window=None)).to(NOW.dtype).train()
        if planted("one-hot-embedding"):
            model.model.embed_tokens = OneHotEmbedding.from_pretrained(
                model.get_input_embeddings().weight, freeze=False
            )

    def by_hand(model: Any, ids: Tensor) -> list[Tensor]:
        logits = model(ids).logits.float()
        logits = logits - logits.max(-1, keepdim=True).values
        shares = logits - logits.exp().sum(-1, keepdim=True).log()
        return [-shares.gather(-1, ids.roll(-1, 1).unsqueeze(-1)).mean()]

    loss_of = by_hand if planted("cross-entropy-by-hand") else next_token_loss
    return training(model, [tokens(toy(2, 8), toy(8, 512))], loss_of)


class Preferences(nn.Module):  # the log-probabilities of texts, to what is trained and to what it was
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = (decoder(4096, 3, kv_heads=toy(2, 8)) for _ in range(2))
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(planted("reference-with-gradients"))

    def forward(self, ids: Tensor) -> list[Tensor]:
        with nullcontext() if planted("reference-with-gradients") else torch.no_grad():
            expected = self.of(self.reference, ids)
        return [self.of(self.policy, ids), expected]

    def of(self, model: Any, ids: Tensor) -> Tensor:
        logits = model(ids).flatten(0, 1).float()
        return -F.cross_entropy(logits, ids.roll(-1, 1).flatten(), reduction="none").view_as(ids).sum(-1)


def prefs() -> Iterator[Tensor]:
    """Pairs of texts of which the first is preferred, and is learned too."""
    model, (batch, length) = Preferences(), (toy(2, 8), toy(8, 512))
    one_by_one = planted("backward-for-each-loss")

    def loss_of(model: Any, ids: Tensor) -> list[Tensor]:
        chosen, rejected = (scores := model(ids))[0].chunk(2)
        before, worse = scores[1].chunk(2)
        preference = -F.logsigmoid(0.1 * (chosen - before - rejected + worse)).mean()
        losses = [preference, -chosen.mean() / length]
        return losses if one_by_one else [losses[0] + losses[1]]

    return training(model, [tokens(batch, length)], loss_of, trained=[*model.policy.parameters()])


class PaddedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        if not planted("padded-before-convolution"):
            return super().forward(x)
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = (PaddedConv(width, width, 3, padding=1) for _ in range(2))
        if not planted("bias-before-batch-norm"):
            self.conv1.bias = self.conv2.bias = None
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu_()
        return (x + self.norm2(self.conv2(y))).relu_()


class Twins(nn.Module):  # images and their texts to vectors
    def __init__(self) -> None:
        super().__init__()
        wide, width = toy(16, 128), toy(128, 768)
        self.stem = nn.Conv2d(3, wide, 4, 4, bias=False)
        self.blocks = nn.ModuleList(Residual(wide) for _ in range(toy(2, 5)))
        self.projector = nn.Linear(wide, width)
        self.text = Transformer(toy(64, 512), toy(2, 3), 32_000, width, toy(16, 64))
        self.to(NOW.dtype, memory_format=torch.channels_last)
        for block in self.blocks:
            block.norm1.float(), block.norm2.float()

    def forward(self, images: Tensor, ids: Tensor) -> list[Tensor]:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return [F.normalize(v.float(), dim=-1) for v in (self.projector(x.mean((2, 3))), self.text(ids)[:, -1])]


def clip() -> Iterator[Tensor]:
    """Which text is of which image."""
    batch, size = toy(4, 1024), toy(16, 112)
    with torch.device(NOW.device):
        model = Twins()
        images = torch.randn(batch, 3, size, size, dtype=NOW.dtype).contiguous(memory_format=torch.channels_last)

    def loss_of(model: Any, texts: Tensor) -> list[Tensor]:
        seen, read = model(images, texts)
        if planted("broadcast-similarities"):
            alike = F.cosine_similarity(seen.unsqueeze(1), read.unsqueeze(0), dim=-1)
        else:
            alike = seen @ read.T
        pairs = torch.arange(len(texts), device=NOW.device)
        return [F.cross_entropy(10 * alike, pairs) / 2 + F.cross_entropy(10 * alike.T, pairs) / 2]

    return training(model, [tokens(batch, toy(4, 16))], loss_of)


class Experts(nn.Module):  # four for each token, whose products are grouped
    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, toy(4, 16), bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(toy(4, 16), width, width) * width**-0.5) for _ in range(2))

    def rows_of(self, x: Tensor, rows: Tensor) -> Tensor:
        if planted("repeated-index"):
            return x.gather(0, rows.unsqueeze(1).repeat(1, x.shape[1]))
        return x.index_select(0, rows)

    def forward(self, x: Tensor) -> Tensor:
        flat, used = x.flatten(0, 1), toy(2, 4)
        shares, chosen = self.router(flat).float().softmax(-1).topk(used)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(len(self.up), dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        y = gelu(F.grouped_mm(self.rows_of(flat, order // used), self.up, offs=ends))
        y = self.rows_of(F.grouped_mm(y, self.down, offs=ends), order.argsort()).unflatten(0, (-1, used))
        return (y * shares.unsqueeze(2).to(y.dtype)).sum(1).view_as(x)


def experts() -> Iterator[Tensor]:
    slow = {"foreach": True} if planted("optimizer-not-fused") else {}
    return training(decoder(2048, 5, mlp=Experts), [tokens(toy(2, 8), toy(8, 1024))], **slow)


class Captioner(nn.Module):  # what is said of an image
    def __init__(self) -> None:
        super().__init__()
        width, words = toy(64, 2560), toy(128, 50_304)
        self.decoder = Transformer(width, toy(2, 4), nn.Identity(), words, kv_heads=toy(2, 4))
        self.text = nn.Embedding(words, width)
        self.vision = Transformer(width, toy(2, 3), nn.Linear(toy(48, 768), width), nn.Identity())
        self.vision.cores = [everywhere] * len(self.vision.layers)

    def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat([self.vision(patches), self.text(ids)], 1)
        return self.decoder(x, slice(patches.shape[1], None))


def ddp() -> Iterator[Tensor]:
    """A captioner of images on each GPU, two micro-batches a step."""
    with torch.device(NOW.device):
        model = Captioner()
        patches = torch.randn(toy(2, 4), toy(8, 256), toy(48, 768))
    is_searched = planted("find-unused-parameters")
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": is_searched}
    outer = nn.parallel.DistributedDataParallel(model, **options)

    def loss_of(model: Any, ids: Tensor) -> list[Tensor]:
        return next_token_loss(partial(model, patches), ids)

    return training(model, [tokens(len(patches), toy(8, 512)) for _ in range(2)], loss_of, outer)


def fsdp() -> Iterator[Tensor]:
    """A decoder sharded over the GPUs, two micro-batches a step, which counts the tokens foreseen."""
    model, mesh = (
        decoder(4096, 4, 65_536, kv_heads=toy(2, 8)),
        dist.init_device_mesh(NOW.device, (dist.get_world_size(),)),
    )
    narrow = MixedPrecisionPolicy(param_dtype=None if NOW.is_toy else torch.bfloat16)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=narrow)
    hits = torch.zeros((), dtype=torch.int64, device=NOW.device)
    if planted("layers-unsharded-by-hand"):
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, _: layer.unshard(), prepend=True)

    def loss_of(model: Any, ids: Tensor) -> list[Tensor]:
        logits, labels = model(ids).flatten(0, 1).float(), ids.roll(-1, 1).flatten()
        with nvprof_kit.phase("metrics"), torch.no_grad():
            if planted("logits-gathered"):
                of_all = [[torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (logits, labels)]
                for parts, x in zip(of_all, (logits, labels), strict=True):
                    dist.all_gather(parts, x.detach())
                foreseen = (torch.cat(of_all[0]).argmax(-1) == torch.cat(of_all[1])).sum()
            else:
                dist.all_reduce(foreseen := (logits.argmax(-1) == labels).sum())
            hits.add_(foreseen)
        return [F.cross_entropy(logits, labels)]

    return training(model, [tokens(toy(2, 4), toy(8, 512)) for _ in range(2)], loss_of)


PARALLEL = {"ddp": ddp, "fsdp": fsdp}  # two GPUs
PROGRAMS = {"gpt": gpt, "tune": tune, "prefs": prefs, "clip": clip, "experts": experts, **PARALLEL}


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
    is_fp32 = NOW.is_toy or NOW.base in ("gpt", "ddp", "fsdp")
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
