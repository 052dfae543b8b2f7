"""What `count_flops` counts, and that it leaves no other trace."""

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_zoo import transformer
from support.torch_release import DTensor, Shard, ones
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import nvprof_kit
import nvprof_kit._instrument.session as session
from nvprof_kit._instrument.flops.counter import OUT_OF_REACH
from nvprof_kit.errors import UsageError

BATCH, LENGTH, WIDTH = 2, 8, 16
MLP = 2 * 2 * BATCH * LENGTH * WIDTH * 4 * WIDTH
"""Forward of `Block.mlp`: two products of BATCH * LENGTH rows by WIDTH x 4 WIDTH, two operations each."""
PHASES = {"forward": 1, "backward": 2}
"""Products by phase: the backward multiplies twice for each of the forward, for the input and for the weight."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Model(nn.Module):
    """Blocks, run plainly or under activation checkpointing; ``ways`` is how."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def batch() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)


def train(model: nn.Module) -> None:
    with nvprof_kit.step(0):
        with nvprof_kit.phase("forward"):
            loss = model(batch()).square().sum()
        with nvprof_kit.phase("backward"):
            loss.backward()


def counted(path: Path, run: Any) -> dict[str, Any]:
    with nvprof_kit.count_flops(path / "run.flops.json") as counting:
        run()
    assert counting.written is not None
    said: dict[str, Any] = json.loads(counting.written.read_text())
    return said


def products(said: dict[str, Any]) -> list[dict[str, Any]]:
    """The operators with floating point operations."""
    return [row for row in said["operators"] if row["flops"]]


def own(said: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Operations of each (layer, phase), without what is nested in it."""
    sums: Counter[tuple[str, str]] = Counter()
    for row in products(said):
        place = said["ranges"][row["range"]]
        sums[place["layer"], place["phase"]] += row["flops"]
    return dict(sums)


def unknown(said: dict[str, Any]) -> set[tuple[str, str]]:
    return {(said["ranges"][row["range"]]["layer"], row["name"]) for row in said["unknown"]}


def test_forward_and_backward_by_layer(tmp_path):
    model = Model()
    nvprof_kit.annotate_model(model, depth=2)
    said = counted(tmp_path, lambda: train(model))
    assert own(said) == {(f"layers.{n}.mlp", phase): MLP * times for n in range(3) for phase, times in PHASES.items()}
    assert said["steps"] == 1 and said["unknown"] == []
    assert {row["dtype"] for row in products(said)} == {"fp32"}
    place = next(row for row in said["ranges"] if row["layer"] == "layers.1.mlp" and row["phase"] == "backward")
    around = said["ranges"][place["inside"]]
    assert (around["layer"], around["phase"], around["calls"]) == ("layers.1", "backward", 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_told_apart(tmp_path, reentrant):
    model = Model(reentrant)
    nvprof_kit.annotate_model(model, depth=2)
    sums = own(counted(tmp_path, lambda: train(model)))
    for n in range(3):
        again = sums[f"layers.{n}.mlp", "recompute"]
        # without reentry the recompute stops early, once it has all that was saved: the last product saves nothing more
        assert again in (MLP, MLP // 2)
        assert sums[f"layers.{n}.mlp", "forward"] == MLP
        assert sums[f"layers.{n}.mlp", "backward"] == 2 * MLP


def test_the_sum_is_that_of_pytorchs_own_counter(tmp_path):
    model = nn.Sequential(nn.Conv1d(LENGTH, 6, 3), nn.Flatten(), nn.Linear(84, 5))
    nvprof_kit.annotate_model(model, depth=1)
    said = counted(tmp_path, lambda: train(model))
    with FlopCounterMode(display=False) as reference:
        train(model)
    assert sum(own(said).values()) == reference.get_total_flops() > 0


def llama() -> tuple[nn.Module, int, int]:
    """A small Llama, its weights in products, and operations of one forward's attention for a batch of 2 x 16."""
    # q and o: 32 x 32 each, k and v: 32 x 16 each, three of 32 x 48, and the head
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 32
    # scores and their weighted sums: two products of 16 x 16 x 32 a sequence and layer
    attention = 2 * 2 * 2 * 16 * 16 * 32 * 2
    return transformer("Llama", "ForCausalLM", num_key_value_heads=2, use_cache=False).model, weights, attention


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "share"),
    [(SDPBackend.MATH, 2), (SDPBackend.FLASH_ATTENTION, 2.5)],  # flash computes the scores again in its backward
)
def test_a_llama_costs_six_operations_a_weight_and_token_and_its_attention(tmp_path, backend, share):
    model, weights, attention = llama()
    nvprof_kit.annotate_model(model)
    tokens = torch.randint(0, 32, (2, 16))

    def run() -> None:
        with sdpa_kernel(backend):
            model(input_ids=tokens, labels=tokens).loss.backward()

    sums = own(counted(tmp_path, run))
    by_phase = {phase: sum(n for (_, at), n in sums.items() if at == phase) for phase in ("forward", "backward")}
    # transformers 4 makes the angles of 4 frequencies and 16 positions by a matrix product, 5 by a broadcast
    angles = sums.get(("model.rotary_emb", "forward"), 0)
    assert angles == (0 if version("transformers") >= "5" else 2 * 4 * 16)
    assert by_phase["forward"] == 2 * weights * 32 + attention + angles
    # the first layer's q, k and v need the gradient of their input, which the embedding takes
    assert by_phase["backward"] == 4 * weights * 32 + share * attention
    assert sum(by_phase.values()) == sum(sums.values())


def test_custom_operators_are_unknown_until_they_have_a_formula(tmp_path):
    # PyTorch 2.4 cannot infer the schema from annotations that are strings
    @torch.library.custom_op("flops_test::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    def run() -> None:
        with nvprof_kit.layer_range("block"):
            product(torch.ones(2, 3), torch.ones(3, 4))

    said = counted(tmp_path, run)
    assert unknown(said) == {("block", "flops_test::product")} and products(said) == []
    packet = torch.ops.flops_test.product
    flop_registry[packet] = lambda a, b, **_: 2 * a.shape[0] * a.shape[1] * b.shape[1]
    try:
        assert own(counted(tmp_path, run)) == {("block", "forward"): 2 * 2 * 3 * 4}
        flop_registry[packet] = lambda *_, **__: 1 // 0  # a formula that fails says nothing and breaks nothing
        assert unknown(counted(tmp_path, run)) == {("block", "flops_test::product")}
    finally:
        del flop_registry[packet]


def test_work_without_a_formula_is_unknown_and_what_multiplies_nothing_is_nothing(tmp_path):
    said = counted(tmp_path, lambda: torch.linalg.inv(torch.mv(torch.eye(3), torch.ones(3)).diag().relu() + 1e-3))
    assert {name for _, name in unknown(said)} == {"aten::mv", "aten::linalg_inv_ex"}
    said = counted(
        tmp_path,
        lambda: torch.linalg.vector_norm(nn.functional.linear(*torch.ones(2, 3, 3)).view(-1).log_softmax(0) + 1),
    )
    assert not unknown(said)


def test_a_thread_of_the_program_is_unknown_not_nothing(tmp_path):
    model = Model()
    nvprof_kit.annotate_model(model, depth=2)

    with ThreadPoolExecutor(1) as pool:
        said = counted(tmp_path, lambda: pool.submit(model, batch()).result())
    assert {(f"layers.{n}.mlp", OUT_OF_REACH) for n in range(3)} <= unknown(said)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_modules_run_eagerly_meanwhile(tmp_path, whole):
    torch._dynamo.reset()
    calls = []

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    model = Model()
    for module in [model] if whole else model.layers:
        module.compile(backend=backend)
    nvprof_kit.annotate_model(model, depth=2)
    train(model)
    before = len(calls)
    sums = own(counted(tmp_path, lambda: train(model)))
    assert before > 0
    if hasattr(torch.compiler, "set_stance"):
        assert len(calls) == before
        assert sums == {(f"layers.{n}.mlp", phase): MLP * times for n in range(3) for phase, times in PHASES.items()}
    else:  # before PyTorch 2.6 nothing makes compiled code run eagerly: it counts as its outermost module's
        whole_of = {"Model": 3 * MLP} if whole else {f"layers.{n}": MLP for n in range(3)}
        assert len(calls) == 2 * before
        assert sums == {(path, phase): times * of for path, of in whole_of.items() for phase, times in PHASES.items()}
    ran = len(calls)
    train(model)
    assert len(calls) == ran + before
    torch._dynamo.reset()


def test_nothing_stays(tmp_path):
    model = Model()
    nvprof_kit.annotate_model(model)
    counted(tmp_path, partial(train, model))
    assert session.backend is None and torch._C._len_torch_dispatch_stack() == 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_one_step_of_a_loop(tmp_path):
    model = Model()
    nvprof_kit.annotate_model(model, depth=2)
    path = tmp_path / "run.flops.json"
    seen = []
    with nvprof_kit.count_flops(path, at_step=1) as counting:
        for number in range(3):
            with nvprof_kit.step(number):
                model(batch())
                seen.append(torch._C._len_torch_dispatch_stack())
            assert path.exists() == (number >= 1)
    assert counting.written == path and seen == [0, 1, 0]
    said = json.loads(path.read_text())
    assert said["steps"] == 1 and own(said) == {(f"layers.{n}.mlp", "forward"): MLP for n in range(3)}
    with pytest.warns(UserWarning, match="no step 9"), nvprof_kit.count_flops(tmp_path / "no.json", at_step=9):
        pass
    assert not (tmp_path / "no.json").exists()


@pytest.mark.parametrize("at_step", [None, 0])
def test_after_an_exception_all_is_as_before_and_nothing_is_written(tmp_path, at_step):
    model = Model()
    nvprof_kit.annotate_model(model, depth=2)
    path = tmp_path / "run.flops.json"
    with pytest.raises(ZeroDivisionError), nvprof_kit.count_flops(path, at_step=at_step), nvprof_kit.step(0):
        model(batch())
        raise ZeroDivisionError
    assert not path.exists() and session.backend is None and torch._C._len_torch_dispatch_stack() == 0
    counted(tmp_path, lambda: train(model))  # and it may begin again


def test_what_cannot_be_counted_is_refused_before_it_runs(tmp_path):
    with pytest.raises(UsageError, match=r"NAME\.flops\.json"), nvprof_kit.count_flops(tmp_path / "run.csv"):
        pass
    with pytest.raises(UsageError, match="cannot be written"), nvprof_kit.count_flops(tmp_path / "no" / "run.json"):
        pass
    with (
        nvprof_kit.count_flops(tmp_path / "a.json"),
        pytest.raises(UsageError, match="already counting"),
        nvprof_kit.count_flops(tmp_path / "b.json"),
    ):
        pass


def test_a_file_that_cannot_be_written_in_the_end_does_not_end_the_program(tmp_path, monkeypatch):
    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with nvprof_kit.count_flops(tmp_path / "a.json", at_step=0) as counting:
        monkeypatch.setattr(Path, "write_text", full)
        with pytest.warns(UserWarning, match=r"a\.json: cannot write it \(No space left"), nvprof_kit.step(0):
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert counting.written is None and not list(tmp_path.iterdir())


def test_each_rank_has_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with nvprof_kit.count_flops(tmp_path / "run.flops.json") as counting:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counting.written == tmp_path / "run.rank3.flops.json"
    assert json.loads(counting.written.read_text())["rank"] == 3


@pytest.mark.parametrize("world", [(0, 4)], indirect=True)
def test_the_shards_of_a_distributed_tensor_are_counted_not_its_whole(world, tmp_path):
    mesh = init_device_mesh("cpu", (4,))
    whole = DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)])  # 16 x 8, a quarter here
    said = counted(tmp_path, lambda: whole @ ones(8, 2, device_mesh=mesh))
    assert sum(own(said).values()) == 2 * 4 * 8 * 2


def traffic(said: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes, and those of them that the L2 cannot hold, by operator."""
    sums: Counter[str] = Counter()
    beyond: Counter[str] = Counter()
    for row in said["operators"]:
        sums[row["name"]] += row["bytes"]
        beyond[row["name"]] += row["dram_bytes"]
    return {name: (sums[name], beyond[name]) for name in sums}


MIB = 2**20
HALVES = torch.ones(8 * 256 * 512, dtype=torch.bfloat16)
BYTES = torch.ones(1024, 1024, dtype=torch.int8)
LARGE = 64 * MIB  # elements of 4 bytes: more than twice the L2 that is assumed without a GPU


ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
TRAFFIC: dict[str, tuple[Callable[[torch.Tensor], object], dict[str, tuple[int, int]]]] = {
    "reads and writes once": (lambda x: x + 1, {"aten::add": (8 * LARGE, 8 * LARGE)}),
    "in place": (lambda x: x.add_(1), {"aten::add_": (8 * LARGE, 8 * LARGE)}),
    "overwritten without being read": (lambda x: x.zero_(), {"aten::zero_": (4 * LARGE, 4 * LARGE)}),
    "read for its shape": (torch.zeros_like, {"aten::zeros_like": (4 * LARGE, 4 * LARGE)}),
    "views": (lambda x: x.view(-1, 2).t()[1:], {}),
    "a sum": (lambda x: x.sum(), {"aten::sum": (4 * LARGE + 4, 4 * LARGE + 4)}),
    "expanded, and held by the L2": (lambda x: x[:1].expand(MIB) * 1.0, {"aten::mul": (4 * MIB + 4, 0)}),
    "rows of an embedding": (
        lambda x: nn.functional.embedding(torch.tensor([1, 5]), x.view(-1, 256)),
        {"aten::embedding": (2 * 2 * 1024 + 2 * 8, 0)},
    ),
    "rows written into a table": (
        lambda x: x.view(-1, 256).index_copy_(0, torch.tensor([1, 5]), torch.ones(2, 256)),
        {"aten::ones": (2048, 0), "aten::index_copy_": (3 * 2048 + 2 * 8, 0)},
    ),
    "a step that fits into the L2": (
        lambda x: x[:MIB].exp_().neg_(),
        {"aten::exp_": (8 * MIB, 0), "aten::neg_": (8 * MIB, 0)},
    ),
    "evicted in between": (
        lambda x: (x[:MIB].exp(), x.exp())[0].neg(),
        {"aten::exp": (8 * MIB + 8 * LARGE, 4 * MIB + 8 * LARGE), "aten::neg": (8 * MIB, 8 * MIB)},
    ),
    "a part of what is larger than the L2": (
        lambda x: x.exp().neg(),
        {"aten::exp": (8 * LARGE, 8 * LARGE), "aten::neg": (8 * LARGE, 8 * LARGE - 50 * MIB)},
    ),
    "read again by a second kernel": (
        lambda x: torch.ops.aten._softmax_backward_data(x.view(-1, 256), x.view(-1, 256), -1, torch.float32),
        {"aten::_softmax_backward_data": (12 * LARGE, 12 * LARGE - 50 * MIB)},
    ),
    "attention without its scores": (
        lambda x: nn.functional.scaled_dot_product_attention(*x[: 3 * MIB].view(3, 1, 16, 1024, 64)),
        {"aten::_scaled_dot_product_flash_attention_for_cpu": (4 * 4 * MIB + 4 * 16 * 1024, 0)},
    ),
    "attention of one token reads the cache of keys and values": (
        lambda x: nn.functional.scaled_dot_product_attention(
            x[:1024].view(1, 16, 1, 64), *x[: 2 * MIB].view(2, 1, 16, 1024, 64)
        ),
        {"aten::_scaled_dot_product_flash_attention_for_cpu": (2 * 4 * MIB + 2 * 4096 + 4 * 16, 0)},
    ),
    "of eight experts the two with tokens": (
        lambda x: torch._grouped_mm(
            HALVES[: 64 * 256].view(64, 256),
            HALVES.view(8, 256, 512),
            offs=torch.tensor([16, 16, 64, 64, 64, 64, 64, 64], dtype=torch.int32),
        ),
        {"aten::_grouped_mm": (2 * (64 * 256 + 2 * 256 * 512 + 64 * 512) + 8 * 4, 0)},
    ),
    "weights of one byte, and rows of the same storage": (
        lambda x: torch._int_mm(BYTES[:64], BYTES),
        {"aten::_int_mm": (MIB + 4 * 64 * 1024, 0)},
    ),
    "half the bytes of a cast": (lambda x: x.bfloat16(), {"aten::_to_copy": (6 * LARGE, 6 * LARGE)}),
    "an optimizer in one kernel": (
        lambda x: torch.ops.aten._fused_adamw_(
            *([x[i * MIB :][:MIB].detach()] for i in range(4)), [], [torch.ones(())], **ADAMW
        ),
        {"aten::_fused_adamw_": (7 * 4 * MIB + 4, 0)},
    ),
    **{
        f"gradients of a norm's {of}": (
            lambda x, mask=mask: torch.ops.aten.native_layer_norm_backward(
                x.view(-1, 256), x.view(-1, 256), [256], *x.view(-1, 1)[: MIB // 2].chunk(2), x[:256], None, mask
            ),
            {"aten::native_layer_norm_backward": (size, size - hit)},
        )
        for of, mask, size, hit in (
            ("input and weights", [True, True, False], 12 * LARGE + 1024, 50 * MIB),
            ("input", [True, False, False], 8 * LARGE, 0),
        )
    },
}


@pytest.mark.parametrize(("run", "expected"), TRAFFIC.values(), ids=TRAFFIC)
def test_traffic_is_each_storage_once_an_operator(run, expected, tmp_path):
    if "aten::_grouped_mm" in expected and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this PyTorch has no grouped product")
    x = torch.ones(LARGE)
    assert {name: sums for name, sums in traffic(counted(tmp_path, lambda: run(x))).items() if sums[0] > 8} == expected


def test_a_causal_mask_leaves_half_of_the_scores(tmp_path):
    query = torch.ones(1, 2, 64, 16)
    said = counted(tmp_path, lambda: nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True))
    (row,) = products(said)
    assert row["flops"] == 4 * 2 * 64 * 64 * 16 and row["least_flops"] == row["flops"] * 65 // 128


@pytest.mark.skipif(torch.__version__ < "2.5", reason="this PyTorch has no grouped queries")
@pytest.mark.parametrize("backward", [False, True])
def test_grouped_queries_are_counted_by_any_release(backward, tmp_path):
    query, key = torch.ones(2, 8, 16, 4, requires_grad=True), torch.ones(2, 2, 32, 4, requires_grad=True)
    attend = partial(nn.functional.scaled_dot_product_attention, query, key, key, enable_gqa=True)
    gradient = attend().sum().backward if backward else None
    said = counted(tmp_path, gradient or attend)
    expected = 2 * 2 * 8 * 16 * 32 * (5 * 4 if backward else 2 * 4)
    assert sum(row["flops"] for row in said["operators"]) == expected and not said["unknown"]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_fused_traffic_is_parameters_inputs_and_outputs_once(tmp_path):
    """What a layer makes and uses itself, also in its backward, is none of it."""
    block = nn.Sequential(Norm(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    model = nn.Sequential(nn.Linear(16, 16, bias=False), block)
    nvprof_kit.annotate_model(model, depth="leaf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nvprof_kit.annotate_optimizer(optimizer)
    x = torch.ones(32, 16)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    said = counted(tmp_path, step)
    fused = {(row["layer"], row["phase"]): row["fused_bytes"] for row in said["ranges"]}
    wide, narrow = 4 * 32 * 16, 4 * 32 * 8  # bytes of activations
    square, last = 4 * 16 * 16, 4 * 16 * 8  # of weights
    assert fused["1.0", "forward"] == wide + 64 + wide  # of five operators
    assert fused["1.1", "forward"] == wide + square + wide
    assert fused["1", "forward"] == wide + 64 + square + last + narrow
    # the gradient of the output (one number, expanded), input, weights; gradients of the input and of the weights
    assert fused["1", "backward"] == 4 + wide + 64 + square + last + wide + 64 + square + last
    assert fused["(none)", "optimizer"] == 3 * (2 * square + 64 + last)
    assert sum(row["bytes"] for row in said["operators"]) > sum(fused[layer, phase] for layer, phase in fused if layer)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_first_step_of_an_optimizer_counts_as_every_other(options, tmp_path):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    nvprof_kit.annotate_optimizer(optimizer)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    first, second = (
        [row for row in said["operators"] if said["ranges"][row["range"]]["phase"] == "optimizer"]
        for said in (counted(tmp_path, step), counted(tmp_path, step))
    )
    assert first == second and first


def test_nothing_counted_is_said(tmp_path):
    with pytest.warns(UserWarning, match="no operator was counted"), nvprof_kit.count_flops(tmp_path / "a.json"):
        pass
