"""Plug-ins of engines that need a GPU or a build of their own: on runners like theirs, and beside their real packages.

`tools/get-engines FOLDER` puts the packages into a folder without what they depend on; ``NVPROF_KIT_ENGINES=FOLDER``
has them read from there, else an installed package is read. Files that import nothing of their engine are executed, the
rest is parsed.
"""

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nvprof_kit.integrations import _host as serving
from nvprof_kit.integrations import megatron, sglang, vllm
from nvprof_kit.integrations.factory import fabric_callbacks, lightning_callbacks


@pytest.fixture(autouse=True)
def no_engine_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_engine", None)
    monkeypatch.setattr(vllm, "_registered", False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

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
    module.GPUModelRunner = type("GPUModelRunner", (), dict(vars(GPUModelRunner)))
    for name in vllm.RUNNERS:
        monkeypatch.setitem(sys.modules, name, module if name == vllm.RUNNERS[0] else ModuleType(name))
    monkeypatch.setitem(sys.modules, vllm.RUNNERS[1], SimpleNamespace(GPUModelRunner=type("Other", (), {})))
    monkeypatch.setitem(sys.modules, vllm.GRAPHS, SimpleNamespace(CudaGraphManager=type("Graphs", (), {})))
    vllm.register()
    vllm.register()  # vLLM calls it once a process, or more often
    return module.GPUModelRunner()


def test_vllm_steps_are_prefill_or_decode(heard, runner):
    runner.load_model()
    for scheduled in (batch(a=7), batch(a=1), batch(a=1, b=9), batch()):
        runner.execute_model(scheduled)
        assert runner.sample_tokens(None) == "tokens"
    serving.engine().end()
    assert heard.outline == ["step 0", "  prefill", "step 1", "  decode", "step 2", "  mixed"]
    assert heard.under("decode") == ["Model", "layers.0", "layers.1"]


def test_layers_in_a_graph_are_named_by_its_batch_size(heard, runner):
    runner.load_model()
    runner._warmup_and_capture(SimpleNamespace(num_tokens=8))
    runner.execute_model(batch(a=1))
    runner.sample_tokens(None)
    serving.engine().end()
    assert heard.under("capture")[:2] == ["graph8.Model", "graph8.layers.0"]
    assert heard.under("decode")[:2] == ["Model", "layers.0"]


def test_sglang_steps(heard):
    runner = type("ModelRunner", (), {"model": Model()})()
    sglang.load_model(lambda _runner: None, runner)
    for mode in ("EXTEND", "DECODE", "MIXED"):
        requests = SimpleNamespace(forward_mode=SimpleNamespace(name=mode))
        sglang.forward(lambda one, _batch: one.model(torch.randn(1, 4)), runner, requests)
        sglang.sample(lambda *_given: None, runner, None, None)
    sglang.capture_one_shape(lambda _graphs, size: runner.model(torch.randn(size, 4)), None, 4)
    serving.engine().end()
    assert heard.outline == ["step 0", "  prefill", "step 1", "  decode", "step 2", "  mixed", "capture"]
    assert heard.under("capture")[0] == "graph4.Model"


def test_megatron_lm(heard, monkeypatch):
    model = Model()
    training = ModuleType(megatron.TRAINING)

    def train_step(forward_step_func: Any, data_iterator: Any, chunks: Any, iteration: int | None = None) -> str:
        chunks[0](torch.randn(2, 4)).sum().backward()
        return "loss"

    training.train_step, training.evaluate = train_step, lambda: None
    monkeypatch.setitem(sys.modules, megatron.TRAINING, training)
    layers = megatron.annotate_training()
    assert [training.train_step(None, None, [model], iteration=number) for number in (4, 5)] == ["loss"] * 2
    layers.close()
    assert training.train_step is train_step
    assert heard.outline == ["step 4", "  forward", "  backward", "step 5", "  forward", "  backward"]


def test_megatron_without_a_recording_wraps_the_backward_step_once(monkeypatch):
    schedules, training = ModuleType(megatron.SCHEDULES), ModuleType(megatron.TRAINING)
    schedules.backward_step = backward_step = lambda: "gradients"
    training.train_step = lambda *_given, **_named: schedules.backward_step()
    training.evaluate = lambda: None
    for module in (schedules, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    layers = megatron.annotate_training(schedule="off")
    wrapped = [training.train_step(None, None, [Model()]) and schedules.backward_step for _ in range(3)]
    layers.close()
    assert len(set(wrapped)) == 1 and schedules.backward_step is backward_step


def test_nothing_is_wrapped_while_nobody_listens(monkeypatch):
    monkeypatch.delenv("NVPROF_KIT_SCHEDULE", raising=False)
    finders = list(sys.meta_path)
    vllm.register()
    sglang.register()
    assert sys.meta_path == finders
    assert lightning_callbacks() == fabric_callbacks() == []


def source(package: str, path: str) -> Path:
    """A file of a package, which is not imported."""
    folder = Path(os.environ.get("NVPROF_KIT_ENGINES", "none")) / package.replace(".", "/")
    if not folder.is_dir():
        spec = importlib.util.find_spec(package.partition(".")[0]) and importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            if os.environ.get("NVPROF_KIT_REQUIRE_ENGINES"):
                pytest.fail(f"no package {package}")
            pytest.skip(f"needs {package}: tools/get-engines FOLDER, NVPROF_KIT_ENGINES=FOLDER")
        folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / path


def signatures(source: Path) -> list[str]:
    """The functions of a file with their parameters, ``Class.method`` among them, and ``Class.field``."""
    found = []
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        inside = [(f"{node.name}.", inner) for inner in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for owner, part in inside:
            if isinstance(part, ast.FunctionDef):
                found.append(f"{owner}{part.name}({','.join(argument.arg for argument in part.args.args)})")
            elif isinstance(part, (ast.Assign, ast.AnnAssign)):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                found += [f"{owner}{target.id}" for target in targets if isinstance(target, ast.Name)]
    return found


def executed(package: str, path: str) -> ModuleType:
    """A file that imports nothing of its package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, source(package, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


WRAPPED = """
vllm v1/worker/gpu_model_runner.py GPUModelRunner execute_model(self,scheduler_output _warmup_and_capture(self,desc
vllm v1/worker/gpu_model_runner.py GPUModelRunner load_model( get_model( sample_tokens(
vllm v1/worker/gpu/model_runner.py GPUModelRunner execute_model(self,scheduler_output load_model( sample_tokens(
vllm v1/worker/gpu/cudagraph_utils.py CudaGraphManager capture(self,create_forward_fn
vllm v1/core/sched/output.py SchedulerOutput num_scheduled_tokens scheduled_spec_decode_tokens
sglang srt/model_executor/model_runner.py ModelRunner forward(self,forward_batch load_model( sample(
sglang srt/model_executor/runner/decode_cuda_graph_runner.py DecodeCudaGraphRunner capture_one_shape(self,size
sglang srt/model_executor/forward_batch_info.py ForwardMode EXTEND DECODE MIXED TARGET_VERIFY
megatron.core pipeline_parallel/schedules.py - backward_step(
composer core/callback.py Callback fit_start(self,state,logger) batch_start( batch_end( eval_start( eval_end( fit_end(
torchtitan tools/profiler.py Profiler __enter__( __exit__( step(
deepspeed runtime/engine.py DeepSpeedEngine backward( step( gradient_accumulation_steps(
deepspeed runtime/engine.py DeepSpeedEngine is_gradient_accumulation_boundary(
"""
"""Package, file, class, and how what is wrapped or called begins there."""

NAMED = """
vllm plugins/__init__.py "vllm.general_plugins"
sglang srt/plugins/__init__.py "sglang.srt.plugins"
composer core/state.py device_train_microbatch_size
torchtitan trainer.py model_parts gradient_accumulation_steps
"""
"""Words that are read or registered."""


@pytest.mark.parametrize("line", WRAPPED.strip().splitlines())
def test_a_package_has_what_is_wrapped(line):
    package, path, owner, *names = line.split()
    there = signatures(source(package, path))
    wrapped = [name if owner == "-" else f"{owner}.{name}" for name in names]
    assert [name for name in wrapped if not any(one.startswith(name) for one in there)] == []


@pytest.mark.parametrize("line", NAMED.strip().splitlines())
def test_a_package_has_what_is_named(line):
    package, path, *words = line.split()
    text = source(package, path).read_text(encoding="utf-8")
    assert [word for word in words if word not in text] == []


def test_sglangs_own_registry_takes_the_hooks(heard, monkeypatch):
    registry = executed("sglang", "srt/plugins/hook_registry.py")
    runner = type("ModelRunner", (), {"load_model": lambda self: setattr(self, "model", Model())})
    runner.forward = lambda self, forward_batch: self.model(torch.randn(1, 4))
    runner.sample = lambda self, output, forward_batch: "tokens"
    module = ModuleType("runners")
    module.ModelRunner = runner
    module.DecodeCudaGraphRunner = type("Graphs", (), {"capture_one_shape": lambda self, size, forward: None})
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setitem(sys.modules, "runners", module)
    monkeypatch.setattr(sglang, "RUNNER", "runners.ModelRunner")
    monkeypatch.setattr(sglang, "GRAPHS", "runners.DecodeCudaGraphRunner")
    sglang.register()
    registry.HookRegistry.apply_hooks()
    one = runner()
    one.load_model()
    one.forward(SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE")))
    assert one.sample(None, None) == "tokens"
    serving.engine().end()
    assert heard.outline == ["step 0", "  decode"]


class CallbackManager:
    """As Megatron Bridge's."""

    def add(self, callbacks: list[Any]) -> None:
        (self.callback,) = callbacks

    def fire(self, event: str, context: Any) -> None:
        getattr(self.callback, event, print)(context)


@pytest.mark.parametrize("own", [False, True])
def test_megatron_bridges_manager_calls_the_callback(own, heard):
    bridge: Any = SimpleNamespace(CallbackManager=CallbackManager, CallbackContext=SimpleNamespace)
    bridge = executed("megatron.bridge", "training/callbacks.py") if own else bridge
    model = Model()
    manager = bridge.CallbackManager()
    manager.add([megatron.LayerCallback()])
    context = bridge.CallbackContext(state=SimpleNamespace(train_state=SimpleNamespace(step=3)), model=[model])
    manager.fire("on_train_start", context)
    for _ in range(2):
        manager.fire("on_train_step_start", context)
        model(torch.randn(2, 4)).sum().backward()
        manager.fire("on_train_step_end", context)
    for event in ("on_eval_start", "on_eval_step_start"):
        manager.fire(event, context)
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))
    for event in ("on_eval_step_end", "on_eval_end", "on_test_start", "on_test_end", "on_train_end"):
        manager.fire(event, context)
    step = ["  forward", "  backward"]
    assert heard.outline == ["step 3", *step, "step 4", *step, "eval", "eval"]
