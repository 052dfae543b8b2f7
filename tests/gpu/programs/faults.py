"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only sparse,engine+head-in-fp32] [--pairs 11] [--seconds 500]
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

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("thirteenth\t")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, UNTIMED, STEPS, CAPTURED, LIMIT_S = 3, 2, 6, 6, 120
ALONE = ("prompts",)  # annotated by annotate_model alone
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


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), attention
        parts = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(*parts)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), *others)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Of tokens at their places, to what the head makes of some rows of the last layer's."""

    def __init__(self, width: int, words: int, head: nn.Module, attentions: list[nn.Module]):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(toy(64, 8192), width)
        self.layers = nn.ModuleList(Block(width, attention) for attention in attentions)
        self.norm, self.head = nn.LayerNorm(width), head

    def forward(self, ids: Tensor, places: Tensor, *others: Any, rows: Any = ...) -> Tensor:
        x = self.embed(ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, *others)
        return self.head(self.norm(x[rows]))


def ready(model: nn.Module, **options: Any) -> Any:
    """The model on its device, annotated; and what annotates."""
    model = model.to(NOW.device, NOW.dtype).eval().requires_grad_(False)
    return model, nvprof_kit.annotate_model(model, **options)


def serving(one: Any) -> Iterator[Tensor]:
    while True:
        with torch.inference_mode():
            values = one()
        yield values


def prompts() -> Iterator[Tensor]:
    """The first token after a long prompt, of a Qwen3 of the library transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads, length = toy(4, 32), toy(16, 8192)
    sizes = {"num_hidden_layers": toy(2, 4), "vocab_size": toy(128, 65_536), "head_dim": toy(16, 128)}
    sizes |= {"hidden_size": toy(64, 4096), "num_attention_heads": heads, "intermediate_size": toy(128, 12_288)}
    is_wide = planted("fp32-weights-under-autocast")
    NOW.dtype = torch.float32 if is_wide else NOW.dtype
    with torch.device(NOW.device):
        model, _ = ready(Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=heads // 4, use_cache=False)))
        ids, pairs = tokens(1, length, 65_536), torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    def one() -> Tensor:
        options = {} if planted("logits-of-the-whole-prompt") else {"logits_to_keep": 1}
        if planted("mask-of-four-dimensions"):
            options["attention_mask"] = pairs
        with torch.autocast(NOW.device, torch.bfloat16, enabled=is_wide and not NOW.is_toy):
            return model(ids, **options).logits[:, -1].float()

    return serving(one)


class Cached(nn.Module):
    """Attention of each request's new token to its ring of earlier ones, then of a prompt's tokens, if there are."""

    def __init__(self, width: int, requests: int, length: int):
        super().__init__()
        self.size, kv_width = toy(16, 128), width // 2
        self.parts = [width, kv_width]
        self.qkv, self.out = nn.Linear(width, sum(self.parts), bias=False), nn.Linear(width, width, bias=False)
        cache = torch.randn(requests, length, kv_width // self.size, self.size, dtype=NOW.dtype)
        self.register_buffer("cache", cache)
        self.register_buffer("starts", torch.arange(requests) * length)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        requests = len(slots)
        q, new = (part.unflatten(-1, (-1, self.size)) for part in self.qkv(x).split(self.parts, -1))
        self.cache.flatten(0, 1).index_copy_(0, self.starts[:requests] + slots, new[:requests])
        pair = self.cache[:requests].transpose(1, 2).chunk(2, 1)
        seen = everywhere(q[:requests].unsqueeze(2), *pair).squeeze(1)
        if len(x) > requests:
            self.cache.flatten(0, 1)[requests - len(x) :].copy_(new[requests:])
            q, *pair = (part[requests:].transpose(0, 1)[None] for part in (q, *new.chunk(2, 1)))
            seen = torch.cat([seen, causal(q, *pair).squeeze(0)])
        return self.out(seen)


def engine() -> Iterator[Tensor]:
    """A token of many requests and the chunk of a prompt, while what other requests have cached goes to the host."""
    width, words, length = toy(64, 4096), toy(128, 128_000), toy(32, 512)
    requests, waiting, chunk = toy(3, 255), toy(2, 20), toy(32, 4096)
    with torch.device(NOW.device):
        rings = requests + waiting + chunk // length
        attentions = [Cached(width, rings, length) for _ in range(toy(2, 8))]
        model, _ = ready(Model(width, words, nn.Linear(width, words, bias=False), attentions))
        if planted("head-in-fp32"):
            model.head.float().register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        ids, slots = tokens(1, requests, words)[0], torch.randint(length, (requests,))
        prompt, places = tokens(1, chunk, words)[0], torch.arange(chunk)
        rows = torch.tensor([*range(requests), -1])
    caches = [attention.cache[requests : requests + waiting] for attention in attentions]
    kept = [pinned(torch.empty(cache.shape, dtype=cache.dtype)) for cache in caches]
    is_beside = not planted("offload-on-the-compute-stream") and NOW.device == "cuda"
    main, side = (torch.cuda.current_stream(), torch.cuda.Stream()) if is_beside else (None, None)

    def one() -> Tensor:
        with nvprof_kit.phase("offload"), torch.cuda.stream(side):
            if side:
                side.wait_stream(main)
            for there, cache in zip(kept, caches, strict=True):
                there.copy_(cache, non_blocking=True)
        with nvprof_kit.phase("forward"):
            logits = model(torch.cat([ids, prompt]), torch.cat([slots, places]), slots, rows=rows)
        with nvprof_kit.phase("sample"):
            ids.copy_(logits[:requests].argmax(-1))
            slots.add_(1).remainder_(length)
        if main:
            main.wait_stream(side)
        return logits.float()

    return serving(one)


class Plain(nn.Module):
    def __init__(self, width: int, size: int):
        super().__init__()
        self.size, self.qkv, self.out = size, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        return self.out(everywhere(*(part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)))


class WordWeights(nn.Module):
    """How much a text is about each word."""

    def __init__(self, width: int, words: int):
        super().__init__()
        self.count, unused = words, 0 if planted("words-not-padded") else -words % 64
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.words = nn.Parameter(F.pad(torch.randn(width, words) * width**-0.5, (0, unused)))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.norm(gelu(self.dense(x))) @ self.words
        if planted("activation-before-the-maximum"):
            return torch.log(1 + torch.relu(logits)).amax(1)[:, : self.count]
        return torch.log1p(torch.relu(logits.amax(1)[:, : self.count]))


class Documents:
    """Batches of documents, as a store answers that has some 12 ms to go."""

    def __init__(self, batches: list[Tensor]):
        self.batches = [pinned(batch.cpu()) for batch in batches]

    def fetch(self) -> Tensor:
        time.sleep(toy(0, 12) / 1e3)
        self.batches.append(self.batches.pop(0))
        return self.batches[-1]

    def __iter__(self) -> Iterator[Tensor]:
        while planted("documents-fetched-in-the-loop"):
            yield self.fetch()
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.fetch)
            while True:
                batch, coming = coming.result(), pool.submit(self.fetch)
                yield batch


def sparse() -> Iterator[Tensor]:
    """What documents are about, in the words that weigh most in each, for an index of words."""
    width, words = toy(64, 768), toy(122, 30_522)
    documents = Documents([tokens(toy(3, 128), toy(8, 256), words) for _ in range(2)])
    with torch.device(NOW.device):
        attentions = [Plain(width, toy(16, 64)) for _ in range(toy(2, 10))]
        model, handle = ready(Model(width, words, WordWeights(width, words), attentions), dataloader=documents)
        places = torch.arange(toy(8, 256))
    batches = iter(handle.dataloader)

    def one() -> Tensor:
        ids = next(batches).to(NOW.device, non_blocking=True)
        with nvprof_kit.phase("forward"):
            weights = model(ids, places)
        with nvprof_kit.phase("index"):
            return weights.topk(toy(8, 64)).values.float().cpu()

    return serving(one)


class Both(nn.MultiheadAttention):  # of each token to those before and after it
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=planted("weights-asked-of-attention"))[0]


class Observer(nn.Module):
    """Which shares of the activations are how large, for the scales of a quantisation."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.flatten().float().abs().sort().values
        self.shares = sizes[:: len(sizes) // toy(8, 1024)].clone()
        return x


def canvas() -> Iterator[Tensor]:
    """A step of a masked diffusion of texts: of the hidden tokens, the one that is surest is filled in."""
    width, words, hidden, mask = toy(64, 2048), toy(128, 126_464), toy(16, 512), toy(127, 126_336)
    with torch.device(NOW.device):
        attentions = [Both(width, width // toy(16, 128), batch_first=True) for _ in range(toy(4, 12))]
        model, _ = ready(Model(width, words, nn.Linear(width, words, bias=False), attentions))
        places, ids = torch.arange(2 * hidden), tokens(toy(2, 8), 2 * hidden, mask)
    if planted("observer-left-in-a-layer"):
        model.layers[-3].mlp.insert(2, Observer().eval())
    (now := ids[:, -hidden:]).fill_(mask)

    def one() -> Tensor:
        with nvprof_kit.phase("forward"):
            logits = model(ids, places, rows=(slice(None), slice(-hidden, None)))
        with nvprof_kit.phase("sample"):
            scores = logits.double() if planted("confidences-in-double") else logits
            shares, found = scores.softmax(-1).max(-1)
            surest = shares.where(now == mask, -1).argmax(-1, keepdim=True)
            now.scatter_(1, surest, found.gather(1, surest))
        return shares.float()

    return serving(one)


PARALLEL: dict[str, Any] = {}  # two GPUs
PROGRAMS = {"prompts": prompts, "engine": engine, "sparse": sparse, "canvas": canvas, **PARALLEL}


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
