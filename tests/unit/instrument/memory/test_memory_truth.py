"""What `MemoryProfiler` says a step holds, against what PyTorch's CPU allocator says it left allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nvprof_kit import MemoryProfiler


def encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True, dropout=0.1)
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    return model, {"input": torch.randn(4, 32, 64)}


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    tokens = torch.randint(0, 500, (2, 40))
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


def gained(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that the CPU allocator holds more after a call than before, while its result lives; and the result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = recorded.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), result


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [encoder, llama])
def test_to_the_byte(
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], mixed: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs = make()

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return model(**inputs)

    forward()
    new_bytes, result = gained(forward)
    del result
    with MemoryProfiler(model, None, tmp_path, pages=False) as profiler:
        result = forward()
        kept_inputs = sum(
            tensor.nbytes
            for tensor in inputs.values()  # they were there before, and count where autograd keeps them
            if tensor.untyped_storage()._cdata in profiler._saved._storages
        )
    forward_end = profiler.points[1]
    assert forward_end.sum_of("activation") + forward_end.sum_of("outputs") - kept_inputs == new_bytes
    assert result is not None


def test_a_whole_step_to_the_byte(tmp_path: Path) -> None:
    model, inputs = encoder()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**inputs).square().mean().backward()
        optimizer.step()

    new_bytes, _ = gained(step)  # gradients and the optimizer's state, which both stay
    with MemoryProfiler(model, optimizer, tmp_path, pages=False) as profiler:
        pass
    assert profiler.points[0].sum_of("grads") + profiler.points[0].sum_of("os_state") == new_bytes
    assert profiler.points[0].sum_of("params") == sum(weight.nbytes for weight in model.parameters())
