"""A PyTorch trace without our ranges, beside the same program with them: which layer every operator belongs to."""

import json
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import nvprof_kit  # noqa: E402

PATHS = {"M": "M", "M.Embedding": "embed", "M.Linear": "head"} | {
    f"M.Block.{block}{part}": f"layers.{block}{name}"
    for block in range(2)
    for part, name in (("", ""), (".LayerNorm", ".norm"), (".Linear.0", ".up"), (".Linear.1", ".down"))
}
"""The names of modules by nesting, class and order among their siblings, and ours."""

Owner = tuple[str, str, str]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class M(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 50)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.layers:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def train(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.arange(64).reshape(8, 8) % 50).logsumexp(-1).mean().backward()


def owners(path: Path) -> list[Owner]:
    """Operator, layer and phase of each stretch of an ``aten::`` operator, in the trace's order; ours are the names."""
    rows = nvprof_kit.open(path).tables["operations"][["name", "layer", "phase"]].itertuples(index=False)
    return [(name, PATHS.get(layer, layer), phase) for name, layer, phase in rows if name.startswith("aten::")]


def without_ours(path: Path) -> Path:
    whole = json.loads(path.read_text())
    whole["traceEvents"] = [
        event for event in whole["traceEvents"] if not str(event.get("name")).startswith("nvprof_kit:")
    ]
    bare = path.with_name("bare.json")
    bare.write_text(json.dumps(whole))
    return bare


@pytest.fixture(params=[None, False, True], ids=["plain", "checkpoint", "reentrant checkpoint"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return M(request.param)


def test_the_same_run_read_with_our_ranges_and_without(model, tmp_path):
    path = tmp_path / "run.json"
    with nvprof_kit.annotate_model(model, depth="leaf"):
        train(model)
        with nvprof_kit.record(path, stacks=True):
            train(model)
    told, truth = owners(without_ours(path)), owners(path)
    differ = [pair for pair in zip(told, truth, strict=True) if pair[0] != pair[1] and pair[1][1] != "(none)"]
    assert len(truth) > 100
    # what differs is the sum of two gradients at a layer's border, which either side may claim
    assert {one[0] for one, _ in differ} <= {"aten::add", "aten::add_", "aten::empty", "aten::detach"}, differ
    assert len(differ) <= 0.03 * len(truth)
    warnings = nvprof_kit.open(tmp_path / "bare.json").layers().warnings
    assert any("sequence numbers" in warning and "(100%) found" in warning for warning in warnings)


WORK = ("aten::addmm", "aten::mm", "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::index_select",
        "aten::embedding_dense_backward", "aten::threshold_backward", "aten::clamp_min", "aten::sum")  # fmt: skip


def test_a_run_that_knows_nothing_of_us(model, tmp_path):
    """The same work of the same layers, in a run of torch.profiler alone and in one recorded by us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        train(model)
    profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    with nvprof_kit.annotate_model(model, depth="leaf"), nvprof_kit.record(tmp_path / "ours.json"):
        train(model)
    theirs, ours = (
        # the loss is outside layers, where we tell no phase and autograd's nodes tell backward
        Counter(owner for owner in owners(tmp_path / name) if owner[0] in WORK and owner[1] != "(none)")
        for name in ("theirs.json", "ours.json")
    )
    assert theirs == ours
    of_backward = {layer for _, layer, phase in theirs if phase == "backward"}
    assert of_backward >= {"embed", "layers.0.up", "layers.1.norm", "head"}
    assert ("recompute" in {phase for *_, phase in theirs}) == (model.reentrant is not None)
