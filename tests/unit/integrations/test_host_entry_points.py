"""The entry points: what hosts load by themselves exists, and Lightning takes it beside the program's own."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.ranges.outline import Outline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
POINTS = {group: next(iter(points.values())) for group, points in PROJECT["entry-points"].items()}


@pytest.mark.parametrize("group", POINTS)
def test_an_entry_point_leads_somewhere(group: str) -> None:
    module, _, name = POINTS[group].partition(":")
    assert callable(getattr(import_module(module), name))


def test_fabric_needs_no_lightning_trainer(heard: Outline, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lightning-fabric`` can be installed alone."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    for name in ("fabric", "lightning"):
        monkeypatch.delitem(sys.modules, f"nvprof_kit.integrations.{name}", raising=False)
    module, _, name = POINTS["lightning.fabric.callbacks_factory"].partition(":")
    assert [type(one).__name__ for one in getattr(import_module(module), name)()] == ["FabricCallback"]


def test_lightning_takes_the_callback_while_somebody_listens(heard: Outline, monkeypatch: pytest.MonkeyPatch) -> None:
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
