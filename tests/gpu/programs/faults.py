"""Programs with a planted performance fault each: measured without a profiler, and captured for `nvprof-kit advise`.

    python tests/gpu/programs/faults.py --out FOLDER [--only bert,llama+gc-collect] [--pairs 9] [--seconds 840]
    python tests/gpu/programs/faults.py --out FOLDER2 --ranks 2
    python tests/gpu/programs/faults.py --device cpu --toy
    python tests/bench/bench_advise.py --faults FOLDER FOLDER2

The first needs a GPU and nsys, and leaves BASE.sqlite.xz, BASE+FAULT.sqlite.xz and meta.jsonl, which the last reads.
The second runs `ddp` and `fsdp` on two GPUs, under torchrun, and captures rank 0. The third runs all programs in this
process, at sizes that say nothing of speed: do they run, and does each with a fault compute what it computes without?

Each program is a process, which runs a stretch of steps whenever it is asked, so that those with and without the fault
are timed in turn; those of a base begin together, and are captured in turn at its end: about 14 s a program. What
FOLDER has is not run again; after the seconds are over no other base begins. A program that fails is one line.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers.models.llama import modeling_llama as llama_code

import nvprof_kit

PLANTED = Path(__file__).parents[2] / "data" / "faults" / "planted.tsv"
FAULTY = [line.split("\t")[1] for line in PLANTED.read_text().splitlines() if line.startswith("seventh")]
"""The programs with a fault; beside them the findings that an expert would accept for each, and where."""

WARM_UP, STEPS, CAPTURED, LIMIT_S = 4, 6, 6, 120
HEAD = 128  # the width of a head
NOW = SimpleNamespace(device="cuda", is_toy=False, base="", fault="", is_met=False)  # what this process runs
Step = Callable[[int], Tensor]
ROPE = llama_code.apply_rotary_pos_emb


def planted(fault: str) -> bool:
    """Whether this process runs the program with that fault."""
    NOW.is_met |= fault == NOW.fault
    return fault == NOW.fault


def dtype() -> torch.dtype:
    is_fp32 = planted("fp32-weights") or NOW.is_toy or NOW.base in ("gpt2", "ddp", "fsdp")
    return torch.float32 if is_fp32 else torch.bfloat16


def toy(small: int, real: int) -> int:
    return small if NOW.is_toy else real


def build(name: str, config: Any, attention: str = "sdpa", **settings: Any) -> Any:
    with torch.device(NOW.device):
        return getattr(hf, name)._from_config(config, dtype=dtype(), attn_implementation=attention, **settings)


def shape(layers: int, width: int, vocabulary: int = 32_000) -> dict[str, Any]:
    width, head = toy(64, width), toy(16, HEAD)
    heads = {"num_attention_heads": width // head, "num_key_value_heads": width // head // 4, "head_dim": head}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": toy(256, vocabulary)}
    return {"num_hidden_layers": toy(2, layers), **heads, **sizes, "pad_token_id": None}


def encoder(layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": toy(64, 1024), "num_attention_heads": toy(2, 16), "intermediate_size": toy(128, 4096)}
    return {"num_hidden_layers": toy(2, layers), **sizes}


def tokens(batch: int, length: int, vocabulary: int = 32_000) -> Tensor:
    return torch.randint(3, toy(256, vocabulary), (toy(2, batch), toy(16, length)), device=NOW.device)


def pin(values: Tensor) -> Tensor:
    return values if NOW.device == "cpu" else values.cpu().pin_memory()


def text_of(rows: list[list[int]]) -> list[str]:
    return [" ".join("".join(chr(97 + word * index % 26) for index in range(9)) for word in row) for row in rows]


def qwen3() -> Step:
    """Prompts through a model whose next token alone is asked for."""
    how, kept = {"output_attentions": True} if planted("output-attentions") else {}, []
    model = build("Qwen3ForCausalLM", hf.Qwen3Config(**shape(8, 2048)), "eager" if how else "sdpa")
    prompts = tokens(8, 1024)
    for layer in model.model.layers[::4] if planted("hidden-to-host") else ():  # to look at once
        layer.register_forward_hook(lambda _, inputs, output: kept.append(output.cpu()))
    nvprof_kit.annotate_model(model)

    def step(number: int) -> Tensor:
        kept.clear()
        logits = model(prompts, logits_to_keep=1 - planted("prompt-logprobs"), **how).logits
        if planted("prompt-logprobs"):
            _ = logits[:, :-1].float().log_softmax(-1).gather(-1, prompts[:, 1:, None]).sum()
        return logits[:, -1]

    return step


def llama() -> Step:
    """A token for each sequence, eager."""
    model = build("LlamaForCausalLM", hf.LlamaConfig(**shape(10, 2048)))
    cache = hf.DynamicCache(config=model.config)
    token = model(tokens(16, 512), past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    nvprof_kit.annotate_model(model)

    def step(number: int) -> Tensor:
        nonlocal token
        logits = model(token, past_key_values=cache).logits[:, -1].float()
        token = logits.argmax(-1, keepdim=True)
        if planted("numpy-sampling"):
            order = np.argsort(-logits.softmax(-1).cpu().numpy(), axis=-1, kind="stable")
            token = torch.from_numpy(order[:, :1]).to(NOW.device)
        if planted("top-logprobs"):  # of each request, as an API shows them
            _ = [[float(value) for value in row.log_softmax(-1).topk(5).values] for row in logits]
        if planted("gc-collect"):
            gc.collect()
        return logits

    return step


def restored(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float() * scale).flatten(1).to(dtype())


def round_weights(model: Any) -> None:
    """Those of the MLPs to 8 bits, kept so, without a kernel that reads them, or as the model needs them."""
    for linear in [linear for layer in model.model.layers for linear in list(layer.mlp.children())[:3]]:
        weight = linear.weight.data.unflatten(1, (-1, 64))
        scale = weight.float().abs().amax(-1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        linear.weight.data = restored(codes, scale)
        if planted("int8-weights"):
            linear.forward = lambda x, codes=codes, scale=scale: F.linear(x, restored(codes, scale))


def engine() -> Step:
    """Two tokens for each sequence by a CUDA graph; or one, beside the prompt of a sequence that takes a place."""
    is_replay = NOW.base == "replay"
    sizes = shape(8, 4096 if is_replay else 2048)
    heads = sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    hf.AttentionInterface.register("engine", lambda *args, **_: attend(*args))
    model = build("LlamaForCausalLM", hf.LlamaConfig(**sizes), "engine")
    prompts, slot = tokens(32, 1024 if is_replay else 3072), 0
    half, token, rows = prompts.shape[1] // 2, prompts[:, :1].clone(), torch.arange(len(prompts), device=NOW.device)
    at, slots, sent = half + rows % 4, torch.arange(2 * half, device=NOW.device), pin(torch.zeros_like(token))
    layout = (sizes["num_hidden_layers"], 2, len(rows), heads, 2 * half, sizes["head_dim"])
    kv = torch.randn(layout, device=NOW.device, dtype=dtype())
    said = [[0] * 20 for _ in rows]
    round_weights(model)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None) -> tuple[Tensor, None]:
        states = kv[module.layer_idx]
        if q.shape[2] > 1:
            states[0, slot, :, :half], states[1, slot, :, :half] = k[0], v[0]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None
        for past, new in zip(states, (k, v), strict=True):
            if planted("onehot-cache"):
                chosen = (slots == at[:, None])[:, None, :, None].to(new.dtype)
                past.copy_(past * (1 - chosen) + new * chosen)
            else:
                past[rows, :, at] = new[:, :, 0]
        if planted("page-loop"):
            each = zip(q.split(1), states.split(1, 1), at, strict=True)
            pages = [(query, *page[..., : int(end) + 1, :]) for query, page, end in each]
            return torch.cat([F.scaled_dot_product_attention(*page) for page in pages]).transpose(1, 2), None
        is_past = (slots <= at[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, *states, attn_mask=is_past).transpose(1, 2), None

    def next_token() -> Tensor:
        logits = model(token, position_ids=at[:, None], use_cache=False).logits[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        at.copy_((at + 1) % (2 * half))
        return logits

    logits, graph = next_token(), torch.cuda.CUDAGraph() if is_replay and NOW.device != "cpu" else None
    if graph is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            logits = next_token()

    def step(number: int) -> Tensor:
        nonlocal slot, logits
        if not is_replay:
            slot = number % len(rows)
            prompt = prompts[slot : slot + 1, :half]
            token[slot], at[slot] = model(prompt, use_cache=False, logits_to_keep=1).logits[0, -1].argmax(), half
        if planted("kv-defrag"):  # nothing has ended
            kv.copy_(kv[:, :, rows])
        for _ in range(2 if is_replay else 1):
            if graph is None:
                logits = next_token()
            else:
                graph.replay()
            sent.copy_(token, non_blocking=True)  # another process makes text of it
            if planted("stop-strings"):
                said[:] = [[*row[1:], new] for row, [new] in zip(said, token.tolist(), strict=True)]
                _ = [text.endswith(("\n\nUser:", "<|end|>")) for text in text_of(said)]
        return logits

    return step


def bert() -> Step:
    """Embeddings of texts, and the nearest of a store of documents."""
    config = hf.BertConfig(vocab_size=32_000, **encoder(12))
    model, texts = build("BertModel", config, add_pooling_layer=False).eval(), pin(tokens(32, 256).cpu())
    lengths = torch.randint(texts.shape[1] // 2, texts.shape[1], texts.shape[:1], device=NOW.device)
    store = torch.randn(toy(100, 40_000), config.hidden_size, device=NOW.device)
    store = store.cpu() if planted("cpu-search") else store

    def step(number: int) -> Tensor:
        hidden = model(texts.to(NOW.device, non_blocking=True)).last_hidden_state.float()
        if planted("pool-loop"):
            values = torch.stack([hidden[row, : int(lengths[row])].mean(0) for row in range(len(lengths))])
        else:
            is_text = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None])[..., None]
            values = (hidden * is_text).sum(1) / lengths[:, None]
        scores = F.normalize(values, dim=-1).to(store.device) @ store.T
        return scores.topk(10).values.cpu()

    return step


def t5() -> Step:
    """Three tokens by generate()."""
    layers = {"num_layers": toy(2, 4), "num_decoder_layers": toy(2, 4), "d_kv": toy(16, 64), "num_heads": toy(4, 16)}
    config = hf.T5Config(vocab_size=toy(256, 32_000), d_model=toy(64, 1024), d_ff=toy(128, 4096), **layers)
    model, prompts = build("T5ForConditionalGeneration", config).eval(), tokens(8, 256)
    words = torch.arange(3, 28, device=NOW.device)
    model.generation_config.update(decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)

    def ban(ids: Tensor, scores: Tensor) -> Tensor:
        if not planted("banned-words"):
            return scores.index_fill(1, words, -torch.inf)
        for row in scores:
            for word in range(3, 28):
                row[word] = -torch.inf
        return scores

    def is_done(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if planted("redecode-text"):  # all of it, for each new token, to see if it ends
            _ = [text.endswith("</s>") for text in text_of(torch.cat([prompts, ids], 1).tolist())]
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    how = {"logits_processor": hf.LogitsProcessorList([ban]), "stopping_criteria": hf.StoppingCriteriaList([is_done])}

    def step(number: int) -> Tensor:
        return model.generate(prompts, max_new_tokens=3, do_sample=False, **how).float()

    return step


def training(model: nn.Module, weights: Any, loss_of: Any, after: Any = None, optimizer: Any = None) -> Step:
    optimizer = optimizer or torch.optim.AdamW(weights, 1e-4, fused=True)
    nvprof_kit.annotate_model(model, optimizer=optimizer)
    is_amp = NOW.base in ("gpt2", "ddp") and not NOW.is_toy

    def step(number: int) -> Tensor:
        with nvprof_kit.phase("forward"), torch.autocast(NOW.device, torch.bfloat16, enabled=is_amp):
            loss = loss_of(number)
        with nvprof_kit.phase("backward"):
            loss.backward()
        _ = after and after(loss)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().float()

    return step


def gpt2() -> Step:
    """All weights, in fp32 with autocast."""
    sizes = {"n_layer": toy(2, 8), "n_embd": toy(64, 1024), "n_head": toy(2, 16), "vocab_size": toy(256, 16_384)}
    model = build("GPT2LMHeadModel", hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    weights = list(model.parameters())
    ids = pin(tokens(8, 1024, 16_384))

    def loss_of(number: int) -> Tensor:
        with nvprof_kit.phase("data"):
            if planted("lazy-text"):  # as a data set that is read once more for each batch
                _ = [text_of(ids.tolist()) for _ in range(4)]
            batch = ids.to(NOW.device, non_blocking=True)
        return model(batch, labels=batch).loss

    def after(loss: Tensor) -> None:
        _ = planted("watch-gradients") and [weight.grad.histc(64).tolist() for weight in weights]  # for a dashboard

    how = {"foreach": False} if planted("amsgrad-loop") else {"fused": True}
    return training(model, weights, loss_of, after, torch.optim.Adam(weights, 1e-4, amsgrad=True, **how))


def qlora() -> Step:
    """Adapters, on answers alone, which are a quarter of the tokens."""
    model = build("LlamaForCausalLM", hf.LlamaConfig(**shape(6, 2048, 64_000))).requires_grad_(False).train()
    round_weights(model)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj", "o_proj"):
            linear, where = getattr(layer.self_attn, name), {"device": NOW.device, "dtype": dtype(), "bias": False}
            shapes = (linear.in_features, 16), (16, linear.out_features)
            adapter = nn.Sequential(*(nn.Linear(*ends, **where) for ends in shapes))
            layer.self_attn.add_module(f"{name}_adapter", adapter)
            linear.register_forward_hook(lambda _, inputs, output, adapter=adapter: output + adapter(*inputs))
    if planted("hf-checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens(4, 1024, 64_000)
    labels = ids.roll(-1, 1).flatten()
    chosen = torch.arange(3, len(labels), 4, device=NOW.device)
    masked = torch.full_like(labels, -100).index_copy(0, chosen, labels[chosen])

    def loss_of(number: int) -> Tensor:
        hidden = model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        if planted("masked-logits"):
            return F.cross_entropy(model.lm_head(hidden).float(), masked)
        return F.cross_entropy(model.lm_head(hidden[chosen]).float(), labels[chosen])

    return training(model, [weight for weight in model.parameters() if weight.requires_grad], loss_of)


def mixture() -> Step:
    sizes = {
        "num_experts": toy(4, 8),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": toy(32, 2048),
        **shape(4, 1024),
    }
    config = hf.Qwen3MoeConfig(**sizes)
    kind = "eager" if planted("experts-eager") else "grouped_mm"
    model, ids = build("Qwen3MoeForCausalLM", config, experts_implementation=kind).train(), tokens(8, 1024)
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]

    def after(_: Tensor) -> None:  # which expert learns?
        _ = planted("expert-norms") and [float(one.float().norm()) for weight in experts for one in weight.grad]

    return training(model, list(model.parameters()), lambda _: model(ids, labels=ids, use_cache=False).loss, after)


def compiled() -> Step:
    """Layers compiled one by one; batches differ in length."""

    def smooth_loss(logits: Tensor, labels: Tensor) -> Tensor:
        logits, total = logits.float(), logits.float().logsumexp(-1)
        chosen = 0.9 * logits.gather(-1, labels[:, None])[:, 0] + 0.1 * logits.mean(-1)
        return (total - chosen).mean() + 1e-4 * total.square().mean()

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1 if planted("static-shapes") else 8
    how = {"backend": "aot_eager" if NOW.is_toy else "inductor", "dynamic": not planted("static-shapes")}
    model = build("LlamaForCausalLM", hf.LlamaConfig(**shape(4, 2048))).train()
    ids, loss = tokens(4, 1024), smooth_loss if planted("eager-loss") else torch.compile(smooth_loss, **how)
    llama_code.apply_rotary_pos_emb = torch.compiler.disable(ROPE) if planted("disabled-rope") else ROPE
    for layer in model.model.layers:
        layer.compile(**how)

    def loss_of(number: int) -> Tensor:
        batch = ids[:, : ids.shape[1] - number % 3 * toy(2, 64)]
        return loss(model(batch[:, :-1], use_cache=False).logits.flatten(0, 1), batch[:, 1:].flatten())

    return training(model, list(model.parameters()), loss_of)


def ddp() -> Step:
    """Images, whose model has a copy on each GPU."""
    config = hf.ViTConfig(image_size=toy(32, 224), num_labels=1000, **encoder(12))
    model = build("ViTForImageClassification", config)
    weights = list(model.parameters())
    images = pin(torch.randn(toy(2, 32), 3, config.image_size, config.image_size))
    labels = torch.randint(1000, images.shape[:1], device=NOW.device)
    cap = 0.1 if planted("small-buckets") else 25
    parallel = model if planted("allreduce-after") else nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)

    def loss_of(number: int) -> Tensor:
        with nvprof_kit.phase("data"):
            batch = images.to(NOW.device, non_blocking=True)
        return parallel(batch, labels=labels).loss

    def after(loss: Tensor) -> None:
        if planted("allreduce-after"):
            for weight in weights:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        if planted("gather-objects"):  # to log those of all ranks
            dist.all_gather_object([None] * dist.get_world_size(), [weight.grad.norm().item() for weight in weights])

    return training(parallel, weights, loss_of, after)


def fsdp() -> Step:
    model, ids = build("LlamaForCausalLM", hf.LlamaConfig(**shape(6, 1024, 16_000))).train(), tokens(8, 1024, 16_000)
    is_fp32 = planted("no-mixed-precision") or NOW.is_toy
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(None if is_fp32 else torch.bfloat16)}
    if planted("cpu-offload"):
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=NOW.device != "cpu")
    for part in [*model.model.layers, model]:
        fully_shard(part, **how)
    for layer in model.model.layers if planted("barrier-per-layer") else ():  # left from a search for a hang
        layer.register_forward_hook(lambda *_: torch.get_device_module(NOW.device).synchronize())
        layer.register_forward_hook(lambda *_: dist.barrier())
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, 1e-4)
    return training(model, weights, lambda _: model(ids, labels=ids, use_cache=False).loss, optimizer=optimizer)


SERVING = {"qwen3": qwen3, "llama": llama, "replay": engine, "batching": engine, "bert": bert, "t5": t5}
PARALLEL = {"ddp": ddp, "fsdp": fsdp}  # two GPUs
PROGRAMS = {**SERVING, "gpt2": gpt2, "qlora": qlora, "mixture": mixture, "compiled": compiled, **PARALLEL}


def run(step: Step, numbers: range) -> Tensor:
    """Run these steps and wait for their end; what the last computes."""
    for number in numbers:
        with nullcontext() if NOW.base in ("replay", "batching", "bert", "t5") else nvprof_kit.step(number + WARM_UP):
            values = step(number)
    torch.get_device_module(NOW.device).synchronize()
    return values


def begin(name: str) -> Step:
    """The program after its warm-up."""
    NOW.base, _, NOW.fault = name.partition("+")
    torch.manual_seed(0)
    hf.logging.set_verbosity_error()
    if NOW.base in PARALLEL and not dist.is_initialized():
        rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo" if NOW.device == "cpu" else "cpu:gloo,cuda:nccl", **rendezvous)
    torch.set_grad_enabled(NOW.base not in SERVING)
    step = PROGRAMS[NOW.base]()
    run(step, range(-WARM_UP, 0))
    return step


def answer(name: str) -> None:
    """Says when it is ready; for each line on stdin of rank 0 runs a stretch of steps, the first not timed."""
    rank, first, order = int(os.environ.get("RANK", "0")), 0, torch.tensor(0)
    step = begin(name)
    if rank == 0:
        print("ready", flush=True)
    while True:
        if rank == 0:
            order.fill_(len(sys.stdin.readline()))
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


def collect(name: str, folder: Path) -> None:
    """Wait for the file `go`, then run the steps that nsys captures."""
    end = time.monotonic() + 2 * LIMIT_S
    while not (folder / "go").exists():
        if time.monotonic() > end or not folder.exists():  # not asked for
            return
        time.sleep(0.05)
    step = begin(name)
    with nullcontext() if NOW.device == "cpu" else torch.cuda.profiler.profile():
        run(step, range(CAPTURED))
    (folder / "done").touch()


def told(program: Popen[str], word: str) -> str:
    """Asks for a line that begins with the word, and returns its rest; the error if the program ends instead."""
    line = ""
    if word == "ms ":
        with suppress(BrokenPipeError):
            print(file=program.stdin, flush=True)
    for line in program.stdout or ():
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(line.strip() or "it had ended before")


def commands(name: str, options: argparse.Namespace, folder: str) -> tuple[list[str], list[str]]:
    """What runs a program to be measured, and what captures it into a folder."""
    module = [sys.executable, "-m"]
    program = [sys.executable, __file__, "--worker", name, "--device", options.device, *["--toy"] * options.toy]
    window = [] if options.device == "cpu" else ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    nsys = ["profile", "-o", f"{folder}/run", *(word for option in window for word in ("-x", option)), "--", *program]
    nsys += ["--window", folder]
    if options.ranks == 1:
        return program, [*module, "nvprof_kit", *nsys]
    launcher = [*module, "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return [*launcher, *program[1:]], [*launcher, "--no-python", *module, "nvprof_kit", "ranks", *nsys]


def start(command: list[str]) -> Popen[str]:
    """A process that is ended, with all that it started, if it hangs."""
    command = ["timeout", "--kill-after=10", str(2 * LIMIT_S), "env", "TORCHINDUCTOR_COMPILE_THREADS=4", *command]
    return Popen(command, text=True, stdin=PIPE, stdout=PIPE, stderr=subprocess.STDOUT)


def measure(name: str, clean: Popen[str], faulty: Popen[str], pairs: int) -> dict[str, Any]:
    """The line of meta.jsonl: times of the steps in ms, with the fault and without it in turn."""
    if faulty is clean:
        clean_ms = [float(told(clean, "ms ")) for _ in range(pairs)]
        return {"name": name, "saving_ms": None, "clean_ms": clean_ms, "faulty_ms": [], "steps": CAPTURED}
    ms: dict[str, list[float]] = {"clean_ms": [], "faulty_ms": []}
    for pair in range(pairs):
        for kind, program in (("clean_ms", clean), ("faulty_ms", faulty))[:: -1 if pair % 2 else 1]:
            ms[kind].append(float(told(program, "ms ")))
    low, saving, high = statistics.quantiles(map(float.__sub__, ms["faulty_ms"], ms["clean_ms"]), n=4)
    medians = {f"median_{kind}": statistics.median(times) for kind, times in ms.items()}
    return {"name": name, "saving_ms": saving, "saving_spread_ms": high - low, **medians, **ms, "steps": CAPTURED}


def pack(line: dict[str, Any], program: Popen[str], folder: Path, out: Path) -> None:
    """When the capture has ended, leaves NAME.sqlite.xz, of rank 0 if there are several, and a line of meta.jsonl."""
    try:
        output, _ = program.communicate(timeout=LIMIT_S)
        exports = sorted(folder.glob("*.sqlite"))
        if not exports:
            raise RuntimeError(f"not captured: {output.strip().splitlines()[-1:]}")
        with exports[0].open("rb") as export, lzma.open(folder / "packed", "wb", preset=3) as packed:
            shutil.copyfileobj(export, packed)
        shutil.move(folder / "packed", out / f"{line['name']}.sqlite.xz")
        with (out / "meta.jsonl").open("a") as meta:
            print(json.dumps(line), file=meta)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"{line['name']}: {error}", flush=True)


def names_of(base: str, options: argparse.Namespace) -> list[str]:
    """The program without a fault and those with one, as far as they are asked for and FOLDER lacks them."""
    names = [base, *(name for name in FAULTY if name.partition("+")[0] == base)]
    names = [name for name in names if options.out is None or not (options.out / f"{name}.sqlite.xz").exists()]
    return [name for name in names if not options.only or {name, *name.split("+")} & set(options.only.split(","))]


def measure_and_capture(base: str, names: list[str], options: argparse.Namespace, end: float) -> None:
    """Those of a base; what takes long, importing torch and building the model, all do at the same time."""
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        programs, captures = {}, {}
        for name in dict.fromkeys([base, *names]):
            (folder / name).mkdir()
            programs[name], captures[name] = map(start, commands(name, options, str(folder / name)))
            for program in (programs[name], captures[name]):
                stack.callback(program.terminate)
        for name, program in programs.items():
            try:
                told(program, "ready")
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
        for name in names if time.monotonic() < end else []:
            began = time.monotonic()
            try:
                lines.append(line := measure(name, programs[base], programs[name], options.pairs))
                times = [f"{key} {value:.3f}, " for key, value in line.items() if isinstance(value, float)]
                times = times or [f"{statistics.median(line['clean_ms']):.3f} ms a step, "]
                print(f"{name}: {''.join(times)}measured in {time.monotonic() - began:.0f} s", flush=True)
            except (RuntimeError, OSError, ValueError) as error:
                print(f"{name}: not measured, {error}", flush=True)
        for program in programs.values():
            program.terminate()
        for program in programs.values():
            program.wait()
        with ThreadPoolExecutor() as pool:  # one leaves the GPU to the next, and is exported meanwhile
            for line in lines:
                place, program, limit = folder / line["name"], captures[line["name"]], time.monotonic() + LIMIT_S
                (place / "go").touch()
                while not (place / "done").exists() and program.poll() is None and time.monotonic() < limit:
                    time.sleep(0.05)
                pool.submit(pack, line, program, place, options.out)


def suite(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for base in PARALLEL if options.ranks > 1 else [base for base in PROGRAMS if base not in PARALLEL]:
        if (names := names_of(base, options)) and time.monotonic() < began + options.seconds:
            measure_and_capture(base, names, options, began + options.seconds)
            print(f"{base}: {len(names)} programs, at {time.monotonic() - began:.0f} s", flush=True)
        elif names:
            print(f"{base}: not run, the {options.seconds} s are over")


def check(options: argparse.Namespace) -> int:
    """Runs all here, each with a fault after the same without; how many failed."""
    failures = 0
    for base in PROGRAMS:
        expected = run(begin(base), range(2)) if (names := names_of(base, options)) else None
        for name in names:
            NOW.is_met = False
            try:
                torch.testing.assert_close(run(begin(name), range(2)), expected, rtol=1e-3, atol=1e-3)
                assert NOW.is_met or name == base, "nothing of the fault was run"
            except Exception as error:
                failures += 1
                print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
    print(f"{failures} of {len(PROGRAMS) + len(FAULTY)} programs failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"out": None, "only": "", "pairs": 9, "seconds": 840.0, "ranks": 1, "device": "cuda"}
    for name, default in {**defaults, "worker": "", "window": None}.items():
        parser.add_argument(f"--{name}", default=default, type=Path if default is None else type(default))
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    NOW.device, NOW.is_toy = options.device, options.toy
    if options.worker:
        if "LOCAL_RANK" in os.environ and options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        collect(options.worker, options.window) if options.window else answer(options.worker)
        if dist.is_initialized():
            dist.destroy_process_group()
    elif options.out is not None:
        suite(options)
    return check(options) if options.out is None and options.toy and not options.worker else 0


if __name__ == "__main__":
    sys.exit(main())
