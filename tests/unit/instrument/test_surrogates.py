"""Names with lone surrogates: they never raise in the program's loop, and are written with numbers in their place."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from nvprof_kit import (
    LayerProfiler,
    annotate_model,
    count_flops,
    layer_range,
    mark,
    phase,
    record,
    step,
)
from nvprof_kit.names import encodable

NAME = "a\ud800b\udcff"
WRITTEN = "a&#55296;b&#56575;"


class Odd(nn.Module):
    """Its parts have names that nobody can write."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self._modules[NAME]:
            x = block(x)
        return x


@layer_range(NAME)
def function(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def loop(model: nn.Module) -> None:
    """Every way to give a name."""
    with step(0), phase(NAME), layer_range(NAME):
        mark(NAME)
        layer_range.end(layer_range.start(NAME))
        (function(model(torch.ones(1, 2, requires_grad=True))) * 1).sum().backward()


def test_every_name_reaches_the_tool_with_a_number_in_place(sink) -> None:
    model = Odd()
    with annotate_model(model):
        loop(model)
    assert {line.strip() for line in sink.lines} >= {WRITTEN, f"mark {WRITTEN}", f"start {WRITTEN}", f"{WRITTEN}.0"}
    assert all(line == encodable(line) for line in sink.lines)


@pytest.mark.parametrize("kinds", [None, {f"{NAME}.*": NAME}])
def test_the_layer_profiler_takes_them(kinds: dict[str, str] | None, tmp_path: Path) -> None:
    model = Odd()
    options = dict(folder=tmp_path, kinds=kinds, name=NAME, plots=False, echo=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LayerProfiler(model, "0:1", **options) as profiling:
            loop(model)
            profiling.step()
    assert len(profiling.recorded) == 1
    written = [path for path in tmp_path.rglob("*") if path.suffix == ".csv"]
    assert any(WRITTEN in path.read_text() for path in written), written


def test_the_recorder_and_the_counter_take_them(tmp_path: Path) -> None:
    model = Odd()
    with annotate_model(model), record(tmp_path / "run.json"), count_flops(tmp_path / "run.flops.json"):
        loop(model)
    assert WRITTEN in (tmp_path / "run.json").read_text()
    assert WRITTEN in (tmp_path / "run.flops.json").read_text()
