"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only vit,decode+cat-cache] [--pairs 9] [--seconds 840]
    python tests/gpu/programs/faults.py --out FOLDER2 --ranks 2
    python tests/gpu/programs/faults.py --device cpu --toy
    python tests/bench/bench_advise.py --faults FOLDER FOLDER2

The first needs a GPU and nsys, and leaves BASE.sqlite.xz, BASE+FAULT.sqlite.xz and meta.jsonl, which the last reads.
The second runs `ddp` and `fsdp` on two GPUs, under torchrun, and captures rank 0. The third runs all programs in this
process, at sizes that say nothing of speed: do they run, and does each with a fault compute what it computes without?

Each program is a process of its own, which runs a stretch of steps whenever it is asked, so that those with and without
the fault are timed in turn: about 20 s a program. What FOLDER has is not run again, and after the seconds are over
nothing new begins. A program that fails is one line.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_transformer import HEAD, NOW, Cache, Lora, Size, Transformer, planted
from torch import Tensor, nn

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [name for line in PLANTED.read_text().splitlines() for name in line.split("\t")[1:2] if "+" in name]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

SIZES = {
    "prefill": Size(2048, 8, 8, 1024),
    "decode": Size(4096, 16, 32, 1024),
    "graph": Size(4096, 24, 8, 1024),
    "mixed": Size(4096, 8, 32, 1024),  # continuous batching
    "embed": Size(1024, 12, 64, 256, "encoder"),
    "train": Size(2048, 6, 4, 1024),
    "lora": Size(2048, 8, 4, 1024),
    "moe": Size(1024, 6, 8, 1024, experts=8),
    "compile": Size(2048, 6, 4, 1024),
    "vit": Size(1024, 12, 32, 196, "vit", 1000),
    "ddp": Size(1024, 8, 4, 1024),
    "fsdp": Size(2048, 6, 4, 1024),
}
WITHOUT_RANGES = {"graph", "mixed", "embed", "compile"}  # of this package
TWO_RANKS = {"ddp+sync-every-micro-step", "fsdp+root-only"}  # nothing to see on one GPU
WARM_UP, STEPS, LIMIT_S = 4, 8, 120
Step = Callable[[int], Tensor]


@contextmanager
def phase(name: str) -> Iterator[None]:
    with nullcontext() if NOW.base in WITHOUT_RANGES else nvprof_kit.phase(name):
        yield
        if planted("timers-sync"):
            torch.get_device_module(NOW.device).synchronize()


def make_model(size: Size) -> Transformer:
    is_fp32 = NOW.is_toy or NOW.base in ("train", "vit", "ddp", "fsdp")
    with torch.device(NOW.device):
        return Transformer(size).to(torch.float32 if is_fp32 else torch.bfloat16)


def draw_tokens(size: Size) -> Tensor:
    return torch.randint(size.vocabulary, (size.batch, size.length), device=NOW.device)


def pin(values: Tensor) -> Tensor:
    return values if planted("pageable-images") or NOW.device == "cpu" else values.pin_memory()


def prefill(size: Size) -> Step:
    model, prompts = make_model(size), draw_tokens(size)
    if planted("cpu-embedding"):
        model.embed.cpu()
    nvprof_kit.annotate_model(model)
    return lambda _: model(prompts, is_last=True)


def embed(size: Size) -> Step:
    model = make_model(size)
    texts = [" ".join(f"word{text * index % 997}" for index in range(size.length)) for text in range(size.batch)]
    if planted("fp32-block"):
        model.blocks[size.layers // 2].float()

    def tokenize() -> Tensor:
        return torch.tensor([[sum(map(ord, word)) % size.vocabulary for word in text.split()] for text in texts])

    tokens = pin(tokenize())

    def step(number: int) -> Tensor:
        batch = tokenize() if planted("host-tokenizer") else tokens
        values = model(batch.to(NOW.device, non_blocking=True))
        return torch.stack([row.cpu() for row in values]) if planted("row-by-row") else values.cpu()

    return step


def decode(size: Size) -> Step:
    """A token for each sequence: eager, replayed, or with the prompt of a sequence that takes another's place."""
    model, prompts, half = make_model(size), draw_tokens(size), size.length // 2
    token, pages, sequences = prompts[:, :1].clone(), prompts.clone(), torch.arange(size.batch, device=NOW.device)
    shape = (size.layers, 2, size.batch, size.width // HEAD, size.length, HEAD)
    kv = torch.randn(shape, device=NOW.device, dtype=model.positions.dtype)
    positions = torch.full_like(sequences, half)
    cache = Cache(kv, half if NOW.base == "decode" else positions, sequences)
    sent = pin(torch.zeros(size.batch, 1, dtype=torch.long))  # another process makes text of it
    replayed = torch.cuda.CUDAGraph() if NOW.base == "graph" and NOW.device != "cpu" else None
    if NOW.base not in WITHOUT_RANGES:
        nvprof_kit.annotate_model(model)

    def next_token() -> Tensor:
        mask = cache.mask()
        if planted("slot-loop") and mask is not None:
            for sequence in range(size.batch):
                mask[sequence, :, :, int(positions[sequence]) + 1 :] = -torch.inf
        logits = model(token, cache, mask)[:, -1]
        if planted("cpu-sampling"):
            token.copy_(logits.float().cpu().softmax(-1).argmax(-1, keepdim=True))
        else:
            token.copy_(logits.argmax(-1, keepdim=True))
        cache.at += 1
        return logits

    logits = next_token()

    def step(number: int) -> Tensor:
        nonlocal logits
        if NOW.base == "mixed":
            slot = number % size.batch
            prompt, prompt_cache = prompts[slot : slot + 1, :half], Cache(kv[:, :, slot : slot + 1], 0, sequences)
            token[slot], positions[slot] = model(prompt, prompt_cache, is_last=True).argmax(-1)[0], half
        elif number % half == 0:
            cache.at = half if NOW.base == "decode" else positions.fill_(half)
        if replayed is None or number < 0:
            logits = next_token()
        else:
            if number == 0:
                with torch.cuda.graph(replayed):
                    logits = next_token()
            replayed.replay()
        sent.copy_(token, non_blocking=True)
        if planted("stop-check"):  # are all sequences at their end, and if not, what is shown of them?
            _ = bool((token == 0).all()) or token.tolist()
        if planted("request-loop"):
            for sequence, request_logits in enumerate(logits):
                token[sequence] = int(request_logits.argmax())
        if planted("host-inputs"):  # the host keeps what the next step needs, and sends all of it
            for state in (token, positions, pages):
                state.copy_(torch.tensor(state.tolist()))
        if planted("empty-cache"):
            torch.cuda.empty_cache()
        if planted("detokenize"):
            _ = ["".join(chr(97 + word * index % 26) for index in range(400)) for [word] in token.tolist()]
        return logits

    return step


def augment(photos: Tensor, side: int) -> Tensor:
    return (F.interpolate(photos.float(), (side, side), mode="bilinear", antialias=True) / 255 - 0.45) / 0.225


def prepare(model: Transformer, size: Size) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model as it is trained, and the weights that are."""
    if NOW.base == "lora":
        model.requires_grad_(False)
        for attention in [block.attn for block in model.blocks]:
            attention.qkv, attention.out = Lora(attention.qkv), Lora(attention.out)
        adapters = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in adapters:
            weight.data = weight.to(NOW.device, torch.float32 if planted("adapter-upcast") else model.positions.dtype)
        if planted("unfrozen-block"):
            model.blocks[size.layers // 2].requires_grad_(True)
        return model, adapters
    if NOW.base == "compile":
        torch._dynamo.reset()
        for block in model.blocks[: -1 if planted("uncompiled-block") else None]:
            block.compile(backend="aot_eager" if NOW.is_toy else "inductor")
    if NOW.base == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for part in [model] if planted("root-only") else [*model.blocks, model]:
            fully_shard(part, mp_policy=MixedPrecisionPolicy(None if NOW.is_toy else torch.bfloat16))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if NOW.base == "ddp" else model
    return parallel, list(model.parameters())


def train(size: Size) -> Step:
    torch.set_float32_matmul_precision("high" if NOW.base == "vit" else "highest")
    torch.autograd.set_detect_anomaly(planted("anomaly"))
    model, weights = prepare(make_model(size), size)
    optimizer = torch.optim.AdamW(weights, 1e-4, **{"foreach": False} if planted("foreach-off") else {"fused": True})
    if NOW.base not in WITHOUT_RANGES:
        nvprof_kit.annotate_model(model, optimizer=optimizer)
    is_vit, side = size.kind == "vit", int(size.length**0.5) * 16
    photos = torch.randint(256, (size.batch, 3, side * 3 // 2, side * 3 // 2), dtype=torch.uint8)
    inputs = pin(augment(photos, side) if is_vit else draw_tokens(size).cpu())
    targets = pin(torch.randint(size.vocabulary, inputs.shape[: 1 if is_vit else 2]))
    micro_steps = 2 if NOW.base == "ddp" else 1

    def backward() -> Tensor:
        with phase("data"):
            is_in_loop = planted("host-augment")
            batch = torch.cat([augment(photo[None], side) for photo in photos]) if is_in_loop else inputs
            batch, labels = (x.to(NOW.device, non_blocking=x.is_pinned()) for x in (batch, targets))
            batch = F.pixel_unshuffle(batch, 16).flatten(2).mT if is_vit else batch
        is_amp = NOW.base in ("train", "ddp") and not NOW.is_toy
        with phase("forward"), torch.autocast(NOW.device, torch.bfloat16, enabled=is_amp):
            logits = model(batch).flatten(0, -2)
            loss = F.cross_entropy(logits.double() if planted("double-loss") else logits.float(), labels.flatten())
        with phase("backward"):
            loss.backward()
        return loss.detach().float()

    def step(number: int) -> Tensor:
        for micro_step in range(micro_steps):
            is_last = micro_step == micro_steps - 1 or planted("sync-every-micro-step")
            with nullcontext() if is_last else model.no_sync():
                loss = backward()
        if planted("clip-loop"):
            norm = sum(float(weight.grad.full_tensor().norm()) ** 2 for weight in weights) ** 0.5
            for weight in weights:
                weight.grad.mul_(min(1.0, 1 / norm))
        else:
            nn.utils.clip_grad_norm_(weights, 1.0)
        if planted("log-norms"):
            _ = [float(weight.grad.norm()) for weight in weights]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def run(step: Step, numbers: range) -> Tensor:
    """Run these steps and wait for their end; what the last computes."""
    for number in numbers:
        with nullcontext() if NOW.base in WITHOUT_RANGES else nvprof_kit.step(number + WARM_UP):
            values = step(number)
    torch.get_device_module(NOW.device).synchronize()
    return values


def begin(name: str) -> Step:
    """The program after its warm-up."""
    NOW.base, _, NOW.fault = name.partition("+")
    torch.manual_seed(0)
    if planted("launch-blocking"):
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    if NOW.base in ("ddp", "fsdp") and not dist.is_initialized():
        rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if NOW.device == "cpu" else "cpu:gloo,cuda:nccl", **rendezvous)
    size = SIZES[NOW.base]
    if NOW.is_toy:
        size = Size(256, 2, 2, 16, size.kind, 512, min(size.experts, 2))
    serving = {"prefill": prefill, **dict.fromkeys(["decode", "graph", "mixed"], decode), "embed": embed}
    torch.set_grad_enabled(NOW.base not in serving)
    step = serving.get(NOW.base, train)(size)
    run(step, range(-WARM_UP, 0))
    return step


def answer(name: str) -> None:
    """Begin at the first line on stdin of rank 0, and for each line run a stretch of steps, the first not timed."""
    rank, first, order = int(os.environ.get("RANK", "0")), 0, torch.tensor(0)
    if rank == 0:
        order.fill_(len(sys.stdin.readline()))
    step = begin(name)
    while True:
        if dist.is_initialized():
            dist.broadcast(order, 0)
        if not order:
            return
        run(step, range(first, first + 1))
        began = time.perf_counter()
        run(step, range(first + 1, first + 1 + STEPS))
        first += 1 + STEPS
        if rank == 0:
            print(f"ms {(time.perf_counter() - began) * 1e3 / STEPS}", flush=True)
            order.fill_(len(sys.stdin.readline()))


def collect(name: str) -> None:
    """Run the steps that nsys captures."""
    step = begin(name)
    with nullcontext() if NOW.device == "cpu" else torch.cuda.profiler.profile():
        run(step, range(STEPS + 1))


def ms_per_step(program: subprocess.Popen[str]) -> float:
    """Has a program run a stretch; its last line is the error if it ends instead."""
    with suppress(BrokenPipeError):
        print(file=program.stdin, flush=True)
    line = ""
    for line in program.stdout or ():
        if line.startswith("ms "):
            return float(line.removeprefix("ms "))
    raise RuntimeError(line.strip() or "it had ended before")


def commands(name: str, options: argparse.Namespace, folder: str) -> tuple[list[str], list[str]]:
    """What runs a program to be measured, and what captures it into a folder."""
    module = [sys.executable, "-m"]
    program = [sys.executable, __file__, "--worker", name, "--device", options.device, *["--toy"] * options.toy]
    window = [] if options.device == "cpu" else ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    nsys = ["profile", "-o", f"{folder}/run", *(word for option in window for word in ("-x", option)), "--", *program]
    if options.ranks == 1:
        return program, [*module, "nvprof_kit", *nsys, "--window"]
    launcher = [*module, "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return [*launcher, *program[1:]], [*launcher, "--no-python", *module, "nvprof_kit", "ranks", *nsys, "--window"]


def start(command: list[str], limit_s: int) -> subprocess.Popen[str]:
    """A process that is ended, with all that it started, if it hangs."""
    command = ["timeout", "--kill-after=10", str(limit_s), *command]
    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=stdout)


def measure(name: str, clean: subprocess.Popen[str], faulty: subprocess.Popen[str], pairs: int) -> dict[str, Any]:
    """The line of meta.jsonl: times of the steps in ms, with the fault and without it in turn."""
    if faulty is clean:
        clean_ms = [ms_per_step(clean) for _ in range(pairs)]
        return {"name": name, "saving_ms": None, "clean_ms": clean_ms, "faulty_ms": [], "steps": STEPS + 1}
    ms: dict[str, list[float]] = {"clean_ms": [], "faulty_ms": []}
    with faulty:
        for pair in range(pairs):
            for kind, program in (("clean_ms", clean), ("faulty_ms", faulty))[:: -1 if pair % 2 else 1]:
                ms[kind].append(ms_per_step(program))
    low, saving, high = statistics.quantiles(map(float.__sub__, ms["faulty_ms"], ms["clean_ms"]), n=4)
    medians = {f"median_{kind}": statistics.median(times) for kind, times in ms.items()}
    return {"name": name, "saving_ms": saving, "saving_spread_ms": high - low, **medians, **ms, "steps": STEPS + 1}


def capture(name: str, options: argparse.Namespace) -> None:
    """Leaves NAME.sqlite.xz, of rank 0 if there are several."""
    with tempfile.TemporaryDirectory() as folder:
        output, _ = start(commands(name, options, folder)[1], LIMIT_S).communicate()
        exports = list(Path(folder).glob("*.sqlite"))
        if not exports:
            raise RuntimeError(f"not captured: {output.strip().splitlines()[-1:]}")
        with exports[0].open("rb") as export, lzma.open(f"{folder}/packed", "wb", preset=3) as packed:
            shutil.copyfileobj(export, packed)
        shutil.move(f"{folder}/packed", options.out / f"{name}.sqlite.xz")


def names_of(base: str, options: argparse.Namespace) -> list[str]:
    """The program without a fault and those with one, as far as they are asked for and FOLDER lacks them."""
    names = [base, *(name for name in FAULTY if name.partition("+")[0] == base)]
    if options.out is not None:
        names = [name for name in names if (options.ranks > 1 or name not in TWO_RANKS)]
        names = [name for name in names if not (options.out / f"{name}.sqlite.xz").exists()]
    return [name for name in names if not options.only or {name, *name.split("+")} & set(options.only.split(","))]


def suite(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    for base in ("ddp", "fsdp") if options.ranks > 1 else SIZES:
        names = names_of(base, options)
        with ExitStack() as stack:  # what takes long, importing torch, all do at the same time
            programs = {name: start(commands(name, options, "")[0], 5 * LIMIT_S) for name in {base, *names} if names}
            for program in programs.values():
                stack.callback(program.terminate)
            for name in names:
                if time.monotonic() > end:
                    return print(f"{options.seconds} s are over: {name} and what follows was not run")
                try:
                    line = measure(name, programs[base], programs[name], options.pairs)
                    capture(name, options)
                except (RuntimeError, OSError) as error:
                    print(f"{name}: {error}", flush=True)
                    continue
                with (options.out / "meta.jsonl").open("a") as meta:
                    print(json.dumps(line), file=meta)
                times = ", ".join(f"{key} {value:.3f}" for key, value in line.items() if isinstance(value, float))
                print(f"{name}: {times or statistics.median(line['clean_ms'])}", flush=True)


def check(options: argparse.Namespace) -> int:
    """Runs all here, each with a fault after the same without; how many failed."""
    failures = 0
    for base in SIZES:
        expected = run(begin(base), range(2)) if (names := names_of(base, options)) else None
        for name in names:
            try:
                NOW.is_met = False
                torch.testing.assert_close(run(begin(name), range(2)), expected, rtol=1e-3, atol=1e-3)
                assert NOW.is_met or name == base, "nothing of the fault was run"
            except Exception as error:
                failures += 1
                print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
    print(f"{failures} of {len(SIZES) + len(FAULTY)} programs failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", help="bases, faults, BASE+FAULT, separated by commas")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=840)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--window", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    NOW.device, NOW.is_toy = options.device, options.toy
    if options.worker:
        if "LOCAL_RANK" in os.environ and options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        (collect if options.window else answer)(options.worker)
    elif options.out is not None:
        suite(options)
    elif options.toy:
        return min(check(options), 1)
    else:
        parser.error("give --out FOLDER, or --toy to try the programs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
