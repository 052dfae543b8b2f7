"""Operations from a trace's shapes alone, against PyTorch's own counter on the same run, forward and backward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nvprof_kit
from nvprof_kit._analysis.flops import shapes
from nvprof_kit._analysis.flops.shapes import work_of
from nvprof_kit.errors import CaptureError

torch = pytest.importorskip("torch")
from support.torch_release import RELEASE  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


class Attention(nn.Module):
    """Self-attention with heads that share keys and values, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 16, bias=False), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        many, length, _ = x.shape
        q = self.q(x).view(many, length, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(many, length, 2, 1, 8).expand(many, length, 2, 4, 8).permute(2, 0, 3, 1, 4)
        return self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Convolutions(nn.Module):
    """Strides, padding, dilation, groups, and one that is transposed; in one and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
            nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1),
            nn.Flatten(2),
            nn.Conv1d(6, 3, 5, bias=False),
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Products(nn.Module):
    """Products that PyTorch makes of others: einsum, matmul in batches, baddbmm, addmm on a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 7))

    def forward(self, x: Any) -> Any:  # (3, 4, 5)
        one = torch.einsum("bij,bjk->bik", x, self.weight)
        two = torch.baddbmm(one, x, self.weight)
        three = two @ self.weight[0].t()
        return torch.addmm(three[0], three[1], torch.ones(5, 5)) @ torch.ones(5, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (2, 8, 32)),
    "attention": (Attention, (2, 8, 32)),
    "convolutions": (Convolutions, (2, 4, 16, 16)),
    "products": (Products, (3, 4, 5)),
    "recurrent cell": (lambda: nn.GRUCell(6, 10), (4, 6)),
}


def recorded(path: Path, run: Callable[[], object], **options: Any) -> Path:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        run()
    profile.export_chrome_trace(str(path))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_all_operations_are_those_of_pytorchs_counter(name: str, dtype: Any, tmp_path: Path) -> None:
    made, shape = MODELS[name]
    torch.manual_seed(0)
    model = made().to(dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if name == "products" and dtype == torch.bfloat16:
        pytest.skip("it mixes types")  # the model, not the counter

    def step() -> None:
        model(torch.randn(shape, dtype=dtype, requires_grad=True)).float().square().mean().backward()

    counter = FlopCounterMode(display=False)
    with counter:
        step()
    path = recorded(tmp_path / "run.json", step, record_shapes=True)
    result = nvprof_kit.open(path).flops()
    # PyTorch's list lacks attention on the CPU, which `count_flops` has too
    with nvprof_kit.count_flops(tmp_path / "count.flops.json"):
        step()
    operators = json.loads((tmp_path / "count.flops.json").read_text())["operators"]
    counted = [row for row in operators if row["flops"]]
    assert result.whole.flops == sum(one["flops"] for one in counted)
    lacking = sum(one["flops"] for one in counted if "for_cpu" in one["name"])
    assert result.whole.flops - lacking == counter.get_total_flops()
    assert {one["dtype"] for one in counted} == {*"+".join(result.rows["dtype"]).split("+")} - {""}


def test_layers_have_their_own_operations_in_both_directions(tmp_path: Path) -> None:
    """Of each layer and phase what `count_flops` counted there, over the steps."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    nvprof_kit.annotate_model(model)

    def steps() -> None:
        for number in range(3):
            with nvprof_kit.step(number):
                model(torch.randn(2, 8, 32)).square().mean().backward()

    with nvprof_kit.count_flops(tmp_path / "other.flops.json"):
        steps()
    path = tmp_path / "run.json.gz"
    with nvprof_kit.record(path, shapes=True):
        steps()
    own = nvprof_kit.open(path).flops().rows.set_index(["layer", "phase"])["flops"]
    counted = nvprof_kit.open(path).flops(tmp_path / "other.flops.json").rows.set_index(["layer", "phase"])["flops"]
    assert own.loc["layers.1.self_attn", "backward"] > own.loc["layers.1.self_attn", "forward"] > 0
    assert own.to_dict() == pytest.approx(counted.to_dict())


def event(name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    times = {"ts": start, "dur": length}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, **times, "args": args}


MM = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return path


def test_what_cannot_be_counted_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        event("aten::linear", 0, 10, **MM),  # holds one that counts: it is that
        event("aten::mm", 1, 5, **MM),
        event("aten::linalg_inv", 20, 5, **MM),
        event("flash_attn::_flash_attn_forward", 30, 5, **MM),
        event("aten::mm", 40, 5),  # without shapes
        event("aten::relu", 50, 5, **MM),
        event("aten::mv", 60, 9, **MM),  # of unknown work, though it holds one that multiplies nothing
        event("aten::fill_", 61, 5, **MM),
        event("autograd::engine::evaluate_function: MmBackward0", 80, 5, **MM),
    )
    result = nvprof_kit.open(path).flops()
    assert result.whole.flops == 2 * 2 * 3 * 4
    (unknown,) = {one for one in result.rows["unknown"] if one}
    assert unknown.split("; ") == ["aten::linalg_inv", "aten::mm", "aten::mv", "flash_attn::_flash_attn_forward"]
    assert any("operators of unknown work" in warning for warning in result.warnings)


def test_a_trace_without_shapes_says_how_to_record_them(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="record_shapes=True"):
        nvprof_kit.open(write(tmp_path / "a.json", event("aten::mm", 0, 10))).flops()


@pytest.mark.parametrize(
    "said",
    [[None, None, None], [[[2, 3]], [], []], [[[2, "x"], [3, 4]], [], []], [[[-2, 3], [3, 4]], [], []], [7, 7, 7]],
)
def test_shapes_that_are_none_are_unknown_work(said: object) -> None:
    assert work_of("aten::mm", json.dumps(said))[1] is None


def test_the_lists_are_those_of_the_counter() -> None:
    """Reading imports no PyTorch, so they are written twice."""
    from torch.utils.flop_counter import flop_registry

    from nvprof_kit._instrument.flops import operators

    assert operators._MULTIPLIES.pattern == shapes.MULTIPLIES.pattern
    assert operators._ONLY_MOVES.pattern == shapes.ONLY_MOVES.pattern
    assert operators._COUNTS_NOTHING == shapes.COUNTS_NOTHING
    known = {str(one).replace(".", "::", 1) for one in (*flop_registry, *operators._OWN)}
    told_by_their_parts = {
        *("aten::cudnn_convolution", "aten::_slow_conv2d_forward"),  # inside aten::convolution
        *("flex_attention", "flex_attention_backward"),  # higher-order operators, which no trace records
        *(f"aten::_{kind}_attention_{way}" for kind in ("flash", "efficient") for way in ("forward", "backward")),
    }
    later = {name for name in shapes.FORMULAS if name not in known} if RELEASE < (2, 13) else set()  # than this PyTorch
    assert known - told_by_their_parts == {*shapes.FORMULAS} - later
