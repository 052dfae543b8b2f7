"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only lora,fsdp+sharded-as-one] [--pairs 11] [--seconds 500]
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
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("twelfth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("lora",)  # annotated by annotate_model alone
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


def by_hand(x: Tensor) -> Tensor:  # GELU
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, width: int, core: Any):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.core, self.heads = core, (-1, toy(16, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            self.core(*(part.unflatten(-1, self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)))
        )


class MLP(nn.Module):
    def __init__(self, width: int, act: Any = gelu):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Scaled(nn.RMSNorm):  # as torch.compile fuses it
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width: int, mlp: Any, core: Any, norm: Any):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm(width), Attention(width, core), norm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):  # to logits of some places
    def __init__(self, width: int, layers: int, words: int, mlp: Any = MLP, core: Any = causal, norm: Any = nn.RMSNorm):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(toy(32, 1024), width)
        self.layers = nn.ModuleList(Layer(width, mlp, core, norm) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), Head(width, words, bias=False)
        self.call: Any = lambda layer, x: layer(x)
        self.to(NOW.device, NOW.dtype)

    def forward(self, x: Tensor, read: slice = slice(None)) -> Tensor:
        x = self.embed(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(self.norm(x[:, read]))


def surprise(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def foresee(model: Any, ids: Tensor) -> Tensor:
    return surprise(model(ids), ids.roll(-1, 1))


def training(model: nn.Module, optimizer: Any, loss_of: Any, batches: Any, clip: Any = None) -> Iterator[Tensor]:
    """Steps of all these batches each, or of what each of them has next."""
    nvprof_kit.annotate_model(model, optimizer=optimizer)
    phase = nullcontext if NOW.base in ALONE else nvprof_kit.phase
    while True:
        total = torch.zeros((), device=NOW.device)
        for given in batches:
            batch = next(given) if isinstance(given, Iterator) else given
            with phase("forward"):
                loss = loss_of(batch) / len(batches)
            with phase("backward"):
                loss.backward()
            total += loss.detach()
        with phase("clip") if clip else nullcontext():
            clip and clip()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def pretrain() -> Iterator[Tensor]:
    """A decoder in bfloat16, three micro-batches a step; the head has as many words as are a multiple of 64."""
    words, padded = toy(131, 32_003), toy(192, 32_064)
    with torch.device(NOW.device):
        model = Reader(toy(64, 3072), toy(2, 4), padded, core=masked if planted("causal-mask-given") else causal)
        bias = torch.where(torch.arange(padded) < words, 0.0, -1e4).to(NOW.dtype)
    used = words if planted("three-words-added") else padded
    model.head.weight, model.head.bias = (nn.Parameter(v[:used].clone()) for v in (model.head.weight.detach(), bias))

    def clip() -> None:
        if planted("gradients-checked-one-by-one"):
            for name, p in model.named_parameters():
                if not torch.isfinite(p.grad).all():
                    raise FloatingPointError(name)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training(model, optimizer, partial(foresee, model), tokens(6, toy(16, 1024), words).chunk(3), clip)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, dtype: Any):
        super().__init__()
        self.base, sizes = base, (base.in_features, toy(4, 32), base.out_features)
        self.a, self.b = (nn.Linear(*sizes[n : n + 2], bias=False, device=NOW.device, dtype=dtype) for n in (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x.to(self.a.weight.dtype))).to(x.dtype)


def lora() -> Iterator[Tensor]:
    """Adapters of the attention of a GPT-NeoX of the library transformers, which learns to answer."""
    from transformers import AttentionInterface, GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": toy(64, 4096), "num_attention_heads": toy(4, 32), "intermediate_size": toy(128, 16_384)}
    AttentionInterface.register("causal", lambda layer, q, k, v, *_, **options: (causal(q, k, v), None))
    sizes |= {"attn_implementation": "causal"}
    sizes |= {"num_hidden_layers": toy(2, 5), "vocab_size": toy(128, 50_304), "max_position_embeddings": 1024}
    with torch.device(NOW.device):
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, use_cache=False)).to(NOW.dtype).train()
    model.requires_grad_(False)
    dtype = torch.float32 if planted("adapters-in-fp32") else NOW.dtype
    for layer in model.gpt_neox.layers:
        for name in ("query_key_value", "dense"):
            setattr(layer.attention, name, Adapted(getattr(layer.attention, name), dtype))
    answer, is_cut = toy(4, 128), planted("logits-of-the-prompt")

    def loss_of(ids: Tensor) -> Tensor:
        logits = model(ids).logits[:, -answer:] if is_cut else model(ids, logits_to_keep=answer).logits
        return surprise(logits, ids.roll(-1, 1)[:, -answer:])

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    return training(model, optimizer, loss_of, [tokens(toy(2, 8), toy(16, 512), 50_304)])


class Experts(nn.Module):  # each takes the tokens that it rates best, as many as the others
    def __init__(self, width: int):
        super().__init__()
        self.number, is_split = toy(4, 8), planted("weights-stacked-in-each-forward")
        self.router = nn.Linear(width, self.number, bias=False)
        parts = [
            torch.randn(self.number, *shape) / shape[0] ** 0.5 for shape in ((width, 2 * width), (2 * width, width))
        ]
        self.up, self.down = (
            nn.ParameterList(w.T.contiguous() for w in part) if is_split else nn.Parameter(part) for part in parts
        )

    def forward(self, x: Tensor) -> Tensor:
        flat, parts = x.flatten(0, 1), [self.up, self.down]
        if isinstance(self.up, nn.ParameterList):
            parts = [torch.stack([w.T for w in part]) for part in parts]
        if planted("routed-in-double"):
            rated = F.linear(flat.double(), self.router.weight.double()).softmax(-1)
        else:
            rated = self.router(flat).float().softmax(-1)
        shares, taken = rated.T.topk(2 * len(flat) // self.number, sorted=False)
        y = flat.index_select(0, taken.flatten()).unflatten(0, (self.number, -1))
        y = torch.bmm(gelu(torch.bmm(y, parts[0])), parts[1]) * shares.to(x.dtype).unsqueeze(2)
        return torch.zeros_like(flat).index_add(0, taken.flatten(), y.flatten(0, 1)).view_as(x)


def mixture() -> Iterator[Tensor]:
    """An encoder of experts, which restores every eighth token."""
    with torch.device(NOW.device):
        model = Reader(toy(64, 2048), toy(2, 4), toy(128, 32_000), Experts, everywhere)
    ids, hidden = tokens(toy(2, 8), toy(16, 1024)), slice(None, None, 8)
    given = ids.clone()
    given[:, hidden] = 0
    way = {"foreach": False} if planted("optimizer-in-a-loop") else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **way)
    return training(model, optimizer, lambda ids: surprise(model(given, hidden), ids[:, hidden]), [ids])


def fetched(host: Tensor) -> Iterator[Tensor]:
    """These values for each step; while it runs, those for the next are copied."""
    here, is_late = [host.to(NOW.device) for _ in range(2)], planted("copied-when-needed")
    aside = torch.cuda.Stream() if NOW.device == "cuda" and not is_late else None
    while True:
        with nvprof_kit.phase("data"):
            if is_late:
                here[0] = host.to(NOW.device)
            elif aside:
                torch.cuda.current_stream().wait_stream(aside)
                here.reverse()
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(aside):
                    here[1].copy_(host, non_blocking=True)
        yield here[0]


def compiled() -> Iterator[Tensor]:
    """A model whose layers are compiled, of patches of images to the codes of those that are hidden, every fourth."""
    width, inputs, hidden = toy(64, 1024), toy(48, 3072), slice(None, None, 4)
    with torch.device(NOW.device):
        model = Reader(width, toy(2, 6), toy(128, 8192), partial(MLP, act=by_hand), everywhere, Scaled)
        model.embed = nn.Linear(inputs, width, dtype=NOW.dtype)
        codes = torch.randint(toy(128, 8192), (toy(2, 384), toy(16, 64)))
    if planted("head-in-fp32"):
        model.head.float()
    is_partial = planted("one-layer-not-compiled")
    for number, layer in enumerate(model.layers):
        if not (is_partial and number == toy(1, 3)):
            layer.compile(dynamic=False, backend="eager" if NOW.is_toy else "inductor")
    patches = torch.randn(*codes.shape, inputs)
    patches[:, hidden] = 0

    def loss_of(patches: Tensor) -> Tensor:
        return surprise(model(patches.to(NOW.dtype), hidden), codes[:, hidden])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training(model, optimizer, loss_of, [fetched(pinned(patches))])


def ddp() -> Iterator[Tensor]:
    """A decoder in bfloat16 on each GPU, whose head is its embedding."""
    mlp = partial(MLP, act=by_hand if planted("gelu-by-hand") else gelu)
    with torch.device(NOW.device):
        model = Reader(toy(64, 4096), toy(2, 7), toy(128, 32_000), mlp)
    model.embed.weight = model.head.weight
    outer = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    ranks, rows = dist.get_world_size(), toy(2, 4)
    shares = [rows] * ranks
    if planted("texts-unevenly-shared") and ranks > 1:
        shares = [rows - 1, *shares[1:-1], rows + 1]
    texts = tokens(rows * ranks, toy(16, 512)).split(shares)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    return training(model, optimizer, partial(foresee, outer), [texts[dist.get_rank()]])


def fsdp() -> Iterator[Tensor]:
    """A decoder sharded over the GPUs, whose gradients are clipped."""
    from torch.utils.checkpoint import checkpoint

    with torch.device(NOW.device):
        model = Reader(toy(64, 4096), toy(2, 5), toy(128, 24_000))
    if planted("layers-checkpointed"):
        model.call = partial(checkpoint, use_reentrant=False)
    narrow = MixedPrecisionPolicy(param_dtype=None if NOW.is_toy else torch.bfloat16)
    mesh = dist.init_device_mesh(NOW.device, (dist.get_world_size(),))
    for module in [model] if planted("sharded-as-one") else [model.embed, *model.layers, model.head, model]:
        fully_shard(module, mesh=mesh, mp_policy=narrow)
    trained = [*model.parameters()]

    def clip() -> None:
        if planted("norm-of-gathered-gradients"):
            norm = torch.stack([p.grad.full_tensor().norm() for p in trained]).norm()
        else:
            norm = nn.utils.get_total_norm([p.grad for p in trained]).full_tensor()
        nn.utils.clip_grads_with_norm_(trained, 1.0, norm)

    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    return training(model, optimizer, partial(foresee, model), [tokens(toy(2, 6), toy(16, 512), 24_000)], clip)


PARALLEL = {"ddp": ddp, "fsdp": fsdp}  # two GPUs
PROGRAMS = {"pretrain": pretrain, "lora": lora, "mixture": mixture, "compiled": compiled, **PARALLEL}


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
