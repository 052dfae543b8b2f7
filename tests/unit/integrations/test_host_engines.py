"""The engines that need a GPU or a build of their own: their real packages have what our plug-ins use.

`tools/get-engines FOLDER` puts the packages into a folder without what they depend on; ``NVPROF_KIT_ENGINES=FOLDER``
has them read from there, else an installed package is read. Files that import nothing of their engine are executed, the
rest is parsed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranges.sink import Outline
from torch import nn

from nvprof_kit.integrations import _engine as serving
from nvprof_kit.integrations import megatron, sglang, vllm


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
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


def parsed(package: str, path: str) -> dict[str, list[str]]:
    """The functions of a file, ``Class.method`` among them, with their parameters; of each class its fields."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(source(package, path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [argument.arg for argument in node.args.args]
        if isinstance(node, ast.ClassDef):
            named = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            named += [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]  # type: ignore[misc]
            found[node.name] = [name.id for name in named if isinstance(name, ast.Name)]
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = [argument.arg for argument in inner.args.args]
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


@pytest.mark.parametrize("path", ["v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"])
def test_vllm_has_what_is_wrapped(path: str) -> None:
    known = parsed("vllm", path)
    assert known["GPUModelRunner.execute_model"][:2] == ["self", "scheduler_output"]
    assert {"GPUModelRunner.load_model", "GPUModelRunner.get_model", "GPUModelRunner.sample_tokens"} <= known.keys()


def test_vllm_captures_as_assumed() -> None:
    runner = parsed("vllm", "v1/worker/gpu_model_runner.py")
    assert runner["GPUModelRunner._warmup_and_capture"][:2] == ["self", "desc"]
    graphs = parsed("vllm", "v1/worker/gpu/cudagraph_utils.py")
    assert graphs["CudaGraphManager.capture"][:2] == ["self", "create_forward_fn"]


def test_vllm_schedules_as_assumed() -> None:
    output = parsed("vllm", "v1/core/sched/output.py")["SchedulerOutput"]
    assert {"num_scheduled_tokens", "scheduled_spec_decode_tokens"} <= set(output)
    assert '"vllm.general_plugins"' in source("vllm", "plugins/__init__.py").read_text(encoding="utf-8")


def test_sglang_has_what_is_wrapped() -> None:
    runner = parsed("sglang", "srt/model_executor/model_runner.py")
    assert runner["ModelRunner.forward"][:2] == ["self", "forward_batch"]
    assert {"ModelRunner.load_model", "ModelRunner.sample"} <= runner.keys()
    graphs = parsed("sglang", "srt/model_executor/runner/decode_cuda_graph_runner.py")
    assert graphs["DecodeCudaGraphRunner.capture_one_shape"][:2] == ["self", "size"]
    modes = parsed("sglang", "srt/model_executor/forward_batch_info.py")["ForwardMode"]
    assert {"EXTEND", "DECODE", "MIXED", "TARGET_VERIFY"} <= set(modes)
    assert '"sglang.srt.plugins"' in source("sglang", "srt/plugins/__init__.py").read_text(encoding="utf-8")


def test_sglangs_own_registry_takes_the_hooks(heard: Outline, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = executed("sglang", "srt/plugins/hook_registry.py")
    runner = type("ModelRunner", (), {"load_model": lambda self: setattr(self, "model", Model())})
    runner.forward = lambda self, forward_batch: self.model(torch.randn(1, 4))  # type: ignore[attr-defined]
    runner.sample = lambda self, output, forward_batch: "tokens"  # type: ignore[attr-defined]
    module = ModuleType("runners")
    module.ModelRunner = runner  # type: ignore[attr-defined]
    module.DecodeCudaGraphRunner = type("Graphs", (), {"capture_one_shape": lambda self, size, forward: None})  # type: ignore[attr-defined]
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


def test_megatron_core_has_what_is_wrapped() -> None:
    assert parsed("megatron.core", "pipeline_parallel/schedules.py")["backward_step"]


def test_megatron_bridges_own_manager_calls_the_callback(heard: Outline) -> None:
    bridge = executed("megatron.bridge", "training/callbacks.py")
    model = Model()
    manager = bridge.CallbackManager()
    manager.add([megatron.LayerCallback()])
    context: Any = bridge.CallbackContext(state=SimpleNamespace(train_state=SimpleNamespace(step=3)), model=[model])
    for event in ("on_train_start", "on_train_step_start"):
        manager.fire(event, context)
    model(torch.randn(2, 4)).sum().backward()
    for event in ("on_train_step_end", "on_eval_start", "on_eval_step_start"):
        manager.fire(event, context)
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))
    for event in ("on_eval_step_end", "on_eval_end", "on_test_start", "on_test_end", "on_train_end"):
        manager.fire(event, context)
    assert heard.outline == ["step 3", "  forward", "  backward", "eval", "eval"]


def test_composer_has_the_events() -> None:
    known = parsed("composer", "core/callback.py")
    for event in ("fit_start", "batch_start", "batch_end", "eval_start", "eval_end", "fit_end", "close"):
        assert known[f"Callback.{event}"] == ["self", "state", "logger"]
    assert "device_train_microbatch_size" in source("composer", "core/state.py").read_text(encoding="utf-8")


def test_torchtitan_has_what_is_inherited() -> None:
    known = parsed("torchtitan", "tools/profiler.py")
    assert {"Profiler.__enter__", "Profiler.__exit__", "Profiler.step"} <= known.keys()
    text = source("torchtitan", "trainer.py").read_text(encoding="utf-8")
    assert "model_parts" in text and "gradient_accumulation_steps" in text


def test_deepspeed_has_what_is_wrapped() -> None:
    known = parsed("deepspeed", "runtime/engine.py")
    wanted = ("backward", "step", "is_gradient_accumulation_boundary", "gradient_accumulation_steps")
    assert {f"DeepSpeedEngine.{name}" for name in wanted} <= known.keys()
