"""Operations from a trace's shapes alone, against PyTorch's own counter on the same run, forward and backward."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.captures.kineto_file import Event, event, kernel, write

import nvprof_kit
from nvprof_kit.errors import CaptureError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


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
    "convolutions": (Convolutions, (2, 4, 16, 16)),
    "products": (Products, (3, 4, 5)),
    "recurrent cell": (lambda: nn.GRUCell(6, 10), (4, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (2, 8, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_operations_are_those_of_pytorchs_counter(name, tmp_path):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().requires_grad_(True)

    def step() -> None:
        model(torch.randn(shape, requires_grad=True)).square().mean().backward()

    counter = FlopCounterMode(display=False)
    with counter:
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    profile.export_chrome_trace(str(tmp_path / "run.json"))
    result = nvprof_kit.open(tmp_path / "run.json").flops()
    # PyTorch's list lacks attention on the CPU, which `count_flops` has too
    with nvprof_kit.count_flops(tmp_path / "count.flops.json"):
        step()
    counted = [row for row in json.loads((tmp_path / "count.flops.json").read_text())["operators"] if row["flops"]]
    assert result.totals.flops == sum(one["flops"] for one in counted)
    lacking = sum(one["flops"] for one in counted if "for_cpu" in one["name"])
    assert result.totals.flops - lacking == counter.get_total_flops()
    assert {one["dtype"] for one in counted} == {*"+".join(result.rows["dtype"]).split("+")} - {""}


def trace(folder: Path, *events: Event) -> Path:
    return write(folder / "a.json", events)


MM = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}


def test_what_cannot_be_counted_is_named(tmp_path):
    path = trace(
        tmp_path,
        event("cpu_op", "aten::linear", 0, 10, **MM),  # holds one that counts: it is that
        event("cpu_op", "aten::mm", 1, 5, **MM),
        event("cpu_op", "aten::linalg_inv", 20, 5, **MM),
        event("cpu_op", "flash_attn::_flash_attn_forward", 30, 5, **MM),
        event("cpu_op", "aten::mm", 40, 5),  # without shapes
        event("cpu_op", "aten::relu", 50, 5, **MM),
        event("cpu_op", "aten::mv", 60, 9, **MM),  # of unknown work, though it holds one that multiplies nothing
        event("cpu_op", "aten::fill_", 61, 5, **MM),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 80, 5, **MM),
    )
    result = nvprof_kit.open(path).flops()
    assert result.totals.flops == 2 * 2 * 3 * 4
    (unknown,) = {one for one in result.rows["unknown"] if one}
    assert unknown.split("; ") == ["aten::linalg_inv", "aten::mm", "aten::mv", "flash_attn::_flash_attn_forward"]
    assert any("operators of unknown work" in warning for warning in result.warnings)


def test_the_operator_in_which_a_recompute_ended_computed_nothing(tmp_path):
    """Activation checkpointing stops early: inside the last product, before its kernel."""
    again = event("user_annotation", "nvprof_kit:recompute:m recompute", 0, 90)
    events = [again, *(event("cpu_op", "aten::mm", at, 20, **MM) for at in (10, 50)), *kernel("gemm", 99, 9, 12, 1)]
    assert nvprof_kit.open(trace(tmp_path, *events)).flops().totals.flops == 2 * 2 * 3 * 4


def test_a_trace_without_shapes_says_how_to_record_them(tmp_path):
    with pytest.raises(CaptureError, match="record_shapes=True"):
        nvprof_kit.open(trace(tmp_path, event("cpu_op", "aten::mm", 0, 10))).flops()


@pytest.mark.parametrize("dims", [[], [[2, 3]], [[2, "x"], [3, 4]], [[-2, 3], [3, 4]], 7, [None, None], [[True], 2]])
def test_shapes_that_are_none_are_unknown_work(dims, tmp_path):
    odd = event("cpu_op", "aten::mm", 20, 10, **{**MM, "Input Dims": dims})
    path = trace(tmp_path, event("cpu_op", "aten::mm", 0, 10, **MM), odd)
    result = nvprof_kit.open(path).flops()
    assert "aten::mm" in "".join(result.rows["unknown"]) and result.totals.flops == 48


def causal_lm(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    def make(transformers: Any) -> nn.Module:
        sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
        config = getattr(transformers, f"{name}Config")(**{**sizes, **heads, **options})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def vision_transformer(transformers: Any) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


def encoder_decoder(transformers: Any) -> nn.Module:
    sizes = {"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + 2.0 * self.b(self.a(x))


def low_rank(transformers: Any) -> nn.Module:
    model: Any = causal_lm("Qwen2")(transformers).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
    return model


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
SIX: dict[str, Callable[[Any], nn.Module]] = {
    "dense": causal_lm("Llama"),
    "mixture of experts": causal_lm("Qwen3Moe", **EXPERTS),
    "vision transformer": vision_transformer,
    "encoder and decoder": encoder_decoder,
    "LoRA": low_rank,
    "state space": causal_lm("Mamba", state_size=8),
}


@pytest.mark.parametrize("name", SIX)
def test_shapes_and_counts_agree_on_six_models(name, tmp_path):
    """FLOPs exactly; bytes of forward and backward within 1 %, and of layers that have a hundredth of them within
    5 %: the shapes of indices, by which experts gather their tokens, are not recorded.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = SIX[name](transformers).bfloat16()
    nvprof_kit.annotate_model(model)
    length = 16 if name == "state space" else 64

    def step() -> None:
        torch.manual_seed(1)
        tokens = torch.randint(1, 256, (2, length))
        pixels = torch.randn(2, 3, 64, 64, dtype=torch.bfloat16)
        batch = {"pixel_values": pixels, "labels": tokens[:, 0] % 2} if name == "vision transformer" else {
            "input_ids": tokens, "labels": tokens}  # fmt: skip
        with nvprof_kit.step(1):
            model(**batch).loss.backward()

    step()
    with nvprof_kit.count_flops(tmp_path / "other.flops.json"):
        step()
    path = tmp_path / "run.json.gz"
    with nvprof_kit.record(path, shapes=True):
        step()
    keys = ["layer", "phase"]
    shapes, counts = (
        nvprof_kit.open(path).flops(file).rows.set_index(keys) for file in (None, tmp_path / "other.flops.json")
    )
    assert shapes["flops"].to_dict() == counts["flops"].to_dict()
    assert shapes["flops"].sum() > 0 and not shapes["unknown"].any()
    ratio = (shapes["bytes"] / counts["bytes"])[counts["bytes"] > 0.01 * counts["bytes"].max()]
    assert len(ratio) > 8 and ratio.between(0.95, 1.05).all(), ratio.to_string()
    assert ratio[ratio.index[0][0]].between(0.99, 1.01).all() and len(ratio[ratio.index[0][0]]) == 2


def test_bytes_of_a_trace_give_limits_that_a_kernel_in_the_l2_does_not_break(tmp_path):
    """A tensor that an operator has just written is not read from memory, but for what is larger than the L2."""
    types = {"Input type": ["c10::BFloat16"], "Concrete Inputs": [""]}
    small, large = ({"Input Dims": [[rows, 2**20]], "Input Strides": [[2**20, 1]], **types} for rows in (8, 64))
    path = trace(
        tmp_path,
        *(event("cpu_op", "aten::silu", at, 5, **small) for at in (0, 10)),
        *(event("cpu_op", "aten::silu", at, 5, **large) for at in (20, 30)),
    )
    (row,) = nvprof_kit.open(path).flops().rows.to_dict("records")
    mib = 2**20
    assert row["bytes"] == 2 * 2 * (16 + 128) * mib
    assert row["dram_bytes"] == (16 + 128 + (128 - 50) + 2 * (128 - 2 * 50)) * mib


def test_an_optimizer_of_which_shapes_are_not_recorded_is_unknown_work(tmp_path):
    """The profiler leaves lists of more than 30 tensors empty."""
    lists = {"Input type": ["TensorList"] * 2, "Concrete Inputs": ["", ""]}
    recorded = {"Input Dims": [[[4, 4], [4]]] * 2, "Input Strides": [[[4, 1], [1]]] * 2, **lists}
    path = trace(
        tmp_path,
        event("cpu_op", "aten::_foreach_add_", 0, 5, **recorded),
        event("cpu_op", "aten::_fused_sgd_", 10, 5, **{**recorded, "Input Dims": [[], []], "Input Strides": [[], []]}),
        event("cpu_op", "aten::mm", 20, 5, **MM),
    )
    (row,) = nvprof_kit.open(path).flops().rows.to_dict("records")
    assert row["unknown"] == "aten::_fused_sgd_" and row["bytes"] == 3 * 20 * 4 + (6 + 12 + 8) * 4
