"""The examples of the hosts, run with the real packages: each at most 25 lines, each with its ranges in their places.

A package that is not installed skips its example. CI has transformers, TRL, accelerate, lightning
and diffusers.
"""

import os
import runpy
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from nvprof_kit._toml import parse_toml

EXAMPLES = Path(__file__).parents[3] / "examples"

NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "trl_sft": ("trl", "datasets"),
    "accelerate_loop": ("accelerate",),
    "lightning_module": ("lightning",),
    "fabric_loop": ("lightning",),
    "flux_pipeline": ("diffusers", "transformers"),
    "deepspeed_engine": ("deepspeed",),
    "torchtitan_profiler": ("torchtitan", "tyro"),
    "composer_trainer": ("composer",),
}
"""Packages that an example imports."""

NOT_RUN = {"vllm_engine", "sglang_engine", "megatron_pretrain", "tiny_transformer"}
"""Those that need a GPU and an engine, and the model that others share."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(name: str) -> dict[str, Any]:
    """Run an example; what its names hold at its end."""
    for package in NEEDS[name]:
        pytest.importorskip(package, exc_type=ImportError)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def micro_batches(count: int, data: bool = False, closures: bool = False) -> list[str]:
    """The outline of a step with micro-batches: data for each or once, the last in an optimizer's closure or not."""
    lines = [] if data else ["  data"]
    for number in range(1, count + 1):
        lines += ["  data"] if data else []
        lines += ["  optimizer"] if closures and number == count else []
        lines += [f"  micro-batch {number}", "    forward", "    backward"]
    return [*lines, "  optimizer"]


def steps(count: int, body: list[str], first: int = 0) -> list[str]:
    return [line for number in range(first, first + count) for line in (f"step {number}", *body)]


def test_trainer(heard):
    run("trainer")
    body = micro_batches(2)
    assert heard.outline == [*steps(3, body), "eval", *steps(3, body, 3), "eval"]
    assert "model.layers.1.mlp" in heard.under("forward")
    assert "model.layers.1.mlp backward" in heard.under("backward")
    assert "model.layers.1.mlp" in heard.under("eval")
    assert heard.under("optimizer") == heard.under("data") == []


def test_trl(heard):
    run("trl_sft")
    assert heard.outline == steps(3, micro_batches(2))
    assert "model.layers.1.mlp" in heard.under("forward")


def test_accelerate(heard):
    run("accelerate_loop")
    # Accelerate fetches a batch ahead, so that the last micro-batch fetches none
    last = [line for index, line in enumerate(micro_batches(2, data=True)) if index != 4]
    assert heard.outline == [*steps(2, micro_batches(2, data=True)), *steps(1, last, 2)]
    assert "layers.1.mlp" in heard.under("forward")


def test_lightning(heard):
    run("lightning_module")
    body = micro_batches(2, data=True, closures=True)
    assert heard.outline == ["eval", *steps(3, body), "eval"]
    assert "model.layers.1.mlp" in heard.under("forward")
    assert "model.layers.1.mlp" in heard.under("eval")


def test_fabric(heard):
    for callback in run("fabric_loop")["fabric"]._callbacks:
        callback.close()  # as the process's end does
    assert heard.outline == steps(4, ["  data", "  forward", "  backward", "  optimizer"])


def test_flux(heard):
    run("flux_pipeline")
    denoising = steps(4, ["  denoising step"])
    assert heard.outline == ["text_encoder_2", "text_encoder", *denoising, "vae decode"]
    assert {name.partition(".")[0] for name in heard.under("denoising step")} == {"transformer"}
    assert "transformer.single_transformer_blocks.1.attn" in heard.under("step 3")
    assert "vae.decoder" in heard.under("vae decode")
    assert "text_encoder_2.encoder.block.1" in heard.under("text_encoder_2")


@pytest.mark.skipif("deepspeed" not in os.environ.get("NVPROF_KIT_HOSTS", ""), reason="compiles for minutes at first")
def test_deepspeed(heard, monkeypatch):
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**one, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    run("deepspeed_engine")
    assert heard.outline == steps(3, micro_batches(2)[1:])
    assert "layers.1.mlp backward" in heard.under("backward")


def test_torchtitan(heard):
    run("torchtitan_profiler")
    assert heard.outline == steps(3, ["  forward", "  backward", "  optimizer"], first=1)


def test_composer(heard):
    run("composer_trainer")
    micro = [["  optimizer", f"  micro-batch {number}", "    forward", "    backward"] for number in (1, 2)]
    assert heard.outline == steps(3, ["  data", *micro[0], *micro[1], "  optimizer"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert path.stem in NEEDS.keys() | NOT_RUN
    if path.stem != "tiny_transformer":
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= 25


PROJECT = parse_toml((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
POINTS = {group: next(iter(points.values())) for group, points in PROJECT["entry-points"].items()}


@pytest.mark.parametrize("group", POINTS)
def test_an_entry_point_leads_somewhere(group):
    module, _, name = POINTS[group].partition(":")
    assert callable(getattr(import_module(module), name))


def test_fabric_needs_no_lightning_trainer(heard, monkeypatch):
    """``lightning-fabric`` can be installed alone."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("fabric", "lightning"):
        monkeypatch.delitem(sys.modules, f"nvprof_kit.integrations.{name}", raising=False)
    module, _, name = POINTS["lightning.fabric.callbacks_factory"].partition(":")
    assert [type(one).__name__ for one in getattr(import_module(module), name)()] == ["FabricCallback"]


def test_lightning_takes_the_callback_while_somebody_listens(heard, monkeypatch):
    lightning = pytest.importorskip("lightning", exc_type=ImportError)
    registry = import_module("lightning.fabric.utilities.registry")
    from nvprof_kit.integrations.lightning import FabricCallback, LayerCallback

    def found(group: str) -> list[EntryPoint]:
        return [EntryPoint("nvprof-kit", POINTS[group], group)] if group in POINTS else []

    monkeypatch.setattr(registry, "entry_points", found)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(**options, callbacks=[LayerCallback()])
    assert sum(isinstance(one, LayerCallback) for one in trainer.callbacks) == 2  # the second stays silent
    fabric = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    assert [type(one) for one in fabric._callbacks] == [FabricCallback]
