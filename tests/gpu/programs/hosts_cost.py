"""Steps per second of one Llama under several hosts, without their integration and with it, in turn.

    python hosts_cost.py [--pairs N] [HOST]...            not listening
    NVPROF_KIT=on python hosts_cost.py                    ranges are made, no tool is attached
    nsys profile --trace=cuda,nvtx python hosts_cost.py   under nsys

Prints a line for each of plain, trainer, lightning and accelerate: milliseconds per step, and the ratio of each pair.
Without a GPU the model is small: that only shows that the program runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from nvprof_kit.integrations import factory

GPU = torch.cuda.is_available()
STEPS, WARM_UP = 20, 5
BATCH, TOKENS = (16, 512) if GPU else (2, 16)
ROWS: list[Any] = [{"input_ids": one, "labels": one} for one in torch.randint(0, 2000, (STEPS * BATCH, TOKENS))]
ended: list[float] = []


def note(*_step: object) -> None:
    """Note when an optimizer step has ended on the GPU, of the last of the warm-up and the last of all."""
    ended.append(0.0)
    if len(ended) in (WARM_UP, STEPS):
        if GPU:
            torch.cuda.synchronize()
        ended[-1] = time.perf_counter()


def make() -> LlamaForCausalLM:
    layers, width, inner, heads = (8, 2048, 5504, 16) if GPU else (2, 32, 64, 4)
    size = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
    size |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    with torch.device("cuda" if GPU else "cpu"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=2000, **size)).to(torch.bfloat16)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(ranged: bool) -> None:
    import nvprof_kit

    model = make()
    optimizer = optimizer_of(model)
    step, phase = (nvprof_kit.step, nvprof_kit.phase) if ranged else (nullcontext, nullcontext)
    with nvprof_kit.annotate_model(model) if ranged else nullcontext():
        for number, batch in enumerate(DataLoader(ROWS, batch_size=BATCH)):
            with step(number):
                inputs = {name: values.to(model.device) for name, values in batch.items()}
                with phase("forward"):
                    loss = model(**inputs).loss
                with phase("backward"):
                    loss.backward()
                with phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()


def trainer(ranged: bool) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from nvprof_kit.integrations.huggingface import LayerCallback

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(folder, per_device_train_batch_size=BATCH, max_steps=STEPS, **quiet)
        callbacks = [LayerCallback()] if ranged else []
        host = Trainer(make(), arguments, train_dataset=ROWS, callbacks=callbacks)
        host.remove_callback(PrinterCallback)
        host.train()


def lightning(ranged: bool) -> None:
    import lightning as host

    from nvprof_kit.integrations.lightning import LayerCallback

    class Module(host.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [LayerCallback()] if ranged else []
    made = host.Trainer(max_epochs=1, logger=False, callbacks=callbacks, accelerator="auto", devices=1, **quiet)
    made.fit(Module(), DataLoader(ROWS, batch_size=BATCH))


def accelerate(ranged: bool) -> None:
    from accelerate import Accelerator

    from nvprof_kit.integrations.accelerate import LayerProfileKwargs

    host, model = Accelerator(), make()
    model, optimizer, batches = host.prepare(model, optimizer_of(model), DataLoader(ROWS, batch_size=BATCH))
    with host.profile(LayerProfileKwargs()) if ranged else nullcontext() as profiler:
        for batch in batches:
            host.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if profiler is not None:
                profiler.step()


HOSTS = {one.__name__: one for one in (plain, trainer, lightning, accelerate)}


def measured(host: str, ranged: bool) -> float:
    """Milliseconds of a step."""
    ended.clear()
    HOSTS[host](ranged)
    return 1e3 * (ended[STEPS - 1] - ended[WARM_UP - 1]) / (STEPS - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts", nargs="*", choices=[[], *HOSTS])
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    register_optimizer_step_post_hook(note)
    factory.lightning_callbacks = list  # else Lightning adds the callback by itself where this package is installed
    for host in arguments.hosts or HOSTS:
        measured(host, True)
        times: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(arguments.pairs):
            for ranged in (False, True) if pair % 2 else (True, False):
                times[ranged].append(measured(host, ranged))
        without, with_ = (statistics.median(times[ranged]) for ranged in (False, True))
        ratios = sorted(a / b for a, b in zip(times[True], times[False], strict=True))
        pairs = " ".join(f"{ratio:.3f}" for ratio in ratios)
        median = statistics.median(ratios)
        print(f"{host:12} {without:7.2f} {with_:7.2f} ms per step, {median:.3f} median of {pairs}", flush=True)


if __name__ == "__main__":
    main()
