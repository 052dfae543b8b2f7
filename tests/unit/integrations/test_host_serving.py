"""The plug-ins of vLLM, SGLang and Megatron: on runners like theirs; `test_host_engines.py` has the real packages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranges.sink import Outline
from torch import nn

from nvprof_kit.integrations import _engine as serving
from nvprof_kit.integrations import megatron, sglang, vllm
from nvprof_kit.integrations.factory import fabric_callbacks, lightning_callbacks


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_engine", None)
    monkeypatch.setattr(vllm, "_registered", False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class GPUModelRunner:
    """As much of vLLM's as is wrapped."""

    model: Any = None

    def load_model(self) -> None:
        self.model = Model()

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        self.model(torch.randn(2, 4))

    def sample_tokens(self, grammar_output: Any) -> str:
        return "tokens"

    def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: Any = None) -> None:
        self.model(torch.randn(desc.num_tokens, 4))


def batch(**tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={})


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("runners")
    module.GPUModelRunner = type("GPUModelRunner", (), dict(vars(GPUModelRunner)))  # type: ignore[attr-defined]
    for name in vllm.RUNNERS:
        monkeypatch.setitem(sys.modules, name, module if name == vllm.RUNNERS[0] else ModuleType(name))
    monkeypatch.setitem(sys.modules, vllm.RUNNERS[1], SimpleNamespace(GPUModelRunner=type("Other", (), {})))
    monkeypatch.setitem(sys.modules, vllm.GRAPHS, SimpleNamespace(CudaGraphManager=type("Graphs", (), {})))
    vllm.register()
    vllm.register()  # vLLM calls it once a process, or more often
    return module.GPUModelRunner()


def test_vllm_steps_are_prefill_or_decode(heard: Outline, runner: Any) -> None:
    runner.load_model()
    for scheduled in (batch(a=7), batch(a=1), batch(a=1, b=9), batch()):
        runner.execute_model(scheduled)
        assert runner.sample_tokens(None) == "tokens"
    serving.engine().end()
    assert heard.outline == ["step 0", "  prefill", "step 1", "  decode", "step 2", "  mixed"]
    assert heard.under("decode") == [
        "Model",
        "layers.0",
        "layers.0.0",
        "layers.0.1",
        *("layers.1", "layers.1.0", "layers.1.1"),
    ]


def test_layers_in_a_graph_are_named_by_its_batch_size(heard: Outline, runner: Any) -> None:
    runner.load_model()
    runner._warmup_and_capture(SimpleNamespace(num_tokens=8))
    runner.execute_model(batch(a=1))
    runner.sample_tokens(None)
    serving.engine().end()
    assert heard.under("capture")[:2] == ["graph8.Model", "graph8.layers.0"]
    assert heard.under("decode")[:2] == ["Model", "layers.0"]


def test_sglang_steps(heard: Outline) -> None:
    runner = type("ModelRunner", (), {"model": Model()})()
    sglang.load_model(lambda _runner: None, runner)
    for mode in ("EXTEND", "DECODE", "MIXED"):
        sglang.forward(
            lambda one, _batch: one.model(torch.randn(1, 4)),
            runner,
            SimpleNamespace(forward_mode=SimpleNamespace(name=mode)),
        )
        sglang.sample(lambda *_given: None, runner, None, None)
    sglang.capture_one_shape(lambda _graphs, size: runner.model(torch.randn(size, 4)), None, 4)
    serving.engine().end()
    assert heard.outline == ["step 0", "  prefill", "step 1", "  decode", "step 2", "  mixed", "capture"]
    assert heard.under("capture")[0] == "graph4.Model"


def test_megatron_bridge(heard: Outline) -> None:
    model = Model()
    context = SimpleNamespace(model=[model], state=SimpleNamespace(train_state=SimpleNamespace(step=7)))
    callback = megatron.LayerCallback()
    callback.on_train_start(context)
    for _ in range(2):
        callback.on_train_step_start(context)
        model(torch.randn(2, 4)).sum().backward()
        callback.on_train_step_end(context)
    callback.on_eval_start(context)
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))
    callback.on_eval_end(context)
    callback.on_train_end(context)
    step = ["  forward", "  backward"]
    assert heard.outline == ["step 7", *step, "step 8", *step, "eval"]


def test_megatron_lm(heard: Outline, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    training = ModuleType(megatron.TRAINING)

    def train_step(forward_step_func: Any, data_iterator: Any, chunks: Any, iteration: int | None = None) -> str:
        chunks[0](torch.randn(2, 4)).sum().backward()
        return "loss"

    training.train_step, training.evaluate = train_step, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, megatron.TRAINING, training)
    layers = megatron.annotate_training()
    assert [training.train_step(None, None, [model], iteration=number) for number in (4, 5)] == ["loss"] * 2
    layers.close()
    assert training.train_step is train_step
    assert heard.outline == ["step 4", "  forward", "  backward", "step 5", "  forward", "  backward"]


def test_nothing_is_wrapped_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)
    finders = list(sys.meta_path)
    vllm.register()
    sglang.register()
    assert sys.meta_path == finders
    assert lightning_callbacks() == fabric_callbacks() == []
