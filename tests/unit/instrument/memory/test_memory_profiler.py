"""`MemoryProfiler`: each kind counted by hand, nothing kept alive, nothing changed, files as the documents show."""

import csv
import gc
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from played_allocator import Allocator
from support.model_zoo import transformer
from support.torch_release import EAGER, RELEASE, DTensor, Shard, fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import nvprof_kit._instrument.session as session
from nvprof_kit import MemoryProfiler
from nvprof_kit._instrument.memory import allocator
from nvprof_kit._instrument.memory.allocator import Boundaries, Counts, History
from nvprof_kit._instrument.memory.files import TimePoint, log_text
from nvprof_kit._instrument.memory.tensors import Ledger, Row
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category

N = 16
MIB = 1 << 20
CPU = torch.device("cpu")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def by_path(point: TimePoint, kind: str) -> dict[str, int]:
    return {row.path: row.bytes for row in point.rows if row.kind == kind}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(N, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return dict(folder=tmp_path / "memory_trace", pages=False)


def test_the_five_kinds_by_hand(options):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryProfiler(model, optimizer, **options) as profiler:
        train(model, optimizer)
    begin, forward, backward, end = profiler.points
    assert [point.name for point in profiler.points[1:]] == ["step 0 forward", "step 0 backward", "step 0 optimizer"]
    weights = {"0.weight": 4 * 8 * 4, "0.bias": 8 * 4, "2.weight": 8 * 2 * 4, "2.bias": 2 * 4}
    assert by_path(begin, "params") == weights
    assert begin.total == sum(weights.values()) == 232
    # autograd keeps the input for the first linear, and ReLU's output, which the second linear keeps too: counted once
    assert by_path(forward, "activation") == {"0": N * 4 * 4, "1": N * 8 * 4}
    assert by_path(forward, "outputs") == {"(none)": N * 2 * 4}
    assert by_path(backward, "grads") == weights
    assert by_path(backward, "activation") == {}
    of_bias = {path for path in by_path(end, "os_state") if path.startswith("0.bias")}
    assert of_bias == {"0.bias.step", "0.bias.exp_avg", "0.bias.exp_avg_sq"}
    assert end.sum_of("os_state") == 2 * 232 + 4 * 4  # two moments, and a step of 4 bytes for each parameter


def begin(model: nn.Module, optimizer: Any = None, **options: Any) -> TimePoint:
    with MemoryProfiler(model, optimizer, **options) as profiler:
        pass
    return profiler.points[0]


def test_tied_weights_and_views_count_once(options):
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    whole = torch.zeros(100)
    model.first = nn.Parameter(whole[:60])
    model.second = nn.Parameter(whole[40:])  # 20 of its 60 numbers are the first one's
    model.third = nn.Parameter(whole[50:70])
    model.sparse = nn.Parameter(torch.eye(3).to_sparse())
    rows = [(row.path, row.bytes) for row in begin(model, **options).rows]
    indices_and_values = [("sparse", 2 * 3 * 8), ("sparse", 3 * 4)]
    assert sorted(rows) == [("embed.weight", 160), ("first", 240), ("second", 160), *sorted(indices_and_values)]


@pytest.mark.parametrize("world", [(5, 8)], indirect=True)
def test_shards_count_by_their_local_part(world, options):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), mesh["dp"], [Shard(0)]))
    assert model.weight.shape == (8, 4)
    with MemoryProfiler(model, mesh=mesh, **options) as profiler:
        assert profiler.points[0].rows == (Row("params", "weight", 2 * 4 * 4, "cpu"),)
    assert profiler.folder.name == "rank5_dp2_tp1_pp0"  # 5 = 2 * 2 + 1


@pytest.mark.skipif(
    RELEASE < (2, 6) and not torch.cuda.is_available(), reason="FSDP2 of this PyTorch makes streams of CUDA"
)
@pytest.mark.parametrize("world", [(0, 2)], indirect=True)
def test_fsdp2(world, options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryProfiler(model, optimizer, **options) as profiler:
        train(model, optimizer)
    start, forward, backward, end = profiler.points
    assert start.sum_of("params") == 232 // 2
    assert backward.sum_of("grads") == 232 // 2
    assert by_path(forward, "activation") == {"0": N * 4 * 4, "1": N * 8 * 4}  # no gathered weight among them
    assert end.sum_of("os_state") == 232 + 4 * 4


def test_checkpointing_keeps_inputs_only(options):
    for reentrant in (False, True):
        model = nn.Sequential(mlp())
        model[0].forward = partial(checkpoint, model[0].forward, use_reentrant=reentrant)
        with MemoryProfiler(model, None, **options) as profiler:
            model(torch.ones(N, 4, requires_grad=True)).square().mean().backward()
        assert profiler.points[1].sum_of("activation") == N * 4 * 4


def test_nothing_is_kept_alive(options):
    model = mlp()
    seen: list[weakref.ref[torch.Tensor]] = []
    model[1].register_forward_hook(lambda _module, _args, output: seen.append(weakref.ref(output)))
    with MemoryProfiler(model, None, **options) as profiler:
        x = torch.ones(N, 4)
        storage = weakref.ref(x)
        output = model(x)
        del x
        output.square().mean().backward()
        profiler.point("after the backward pass")
        assert not by_path(profiler.points[-1], "activation")
        del output
        assert [reference() for reference in seen] == [None]
        assert storage() is None
        model(torch.ones(N, 4))  # dropped without a backward pass
        gc.collect()
        profiler.point("at the end")
        assert not by_path(profiler.points[-1], "activation")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("compiled_before", [False, True])
@pytest.mark.parametrize("name", [EAGER, "aot_eager"])
def test_a_compiled_model_is_one_module_and_stays_compiled(name, compiled_before, options):
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    model = torch.compile(mlp(), backend=backend, fullgraph=True)
    x = torch.ones(N, 4)
    if compiled_before:
        model(x).sum().backward()
    with MemoryProfiler(model, None, **options) as profiler:
        model(x).sum().backward()
    assert len(graphs) == 1
    assert by_path(profiler.points[1], "activation") == {"OptimizedModule": N * 4 * 4 + N * 8 * 4}


def is_followed(model: nn.Module) -> bool:
    """Whether there is something around the call of a module."""
    return any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_the_hooks_are_gone_afterwards_also_after_an_exception(options):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(MemoryError), MemoryProfiler(model, optimizer, **options) as profiler:
        train(model, optimizer)
        assert is_followed(model)
        raise MemoryError
    assert not is_followed(model)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert len(profiler.points) == 4
    train(model, optimizer)
    assert len(profiler.points) == 4
    assert (profiler.folder / "memory.log").read_text().count("Memory State:") == 4


def test_the_files_of_the_documents(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryProfiler(model, optimizer, tmp_path) as profiler:
        train(model, optimizer)
    assert profiler.folder == tmp_path / "rank0_dp0_tp0_pp0"
    pages = ["activation", "grads", "os", "os_params", "params"]
    files = [".owner", *(f"{kind}_memory_sunburst.html" for kind in pages), "memory.csv", "memory.log"]
    assert {path.name for path in profiler.folder.iterdir()} == {*files, "summary_sunburst.html"}
    with (profiler.folder / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["bytes"]) for row in rows if row["point"] == "0" and row["kind"] == "params") == 232


LAYOUT = """\
Memory State:
time: 37.5
---summary---
total_memory: 902.02 MB
params_memory: 902.02 MB, grads_memory: 0.00 MB, os_params_memory: 0.00 MB, os_state_memory: 0.00 MB, \
activation_memory: 0.00 MB
point: step 0 forward, allocated_memory: 1024.00 MB, reserved_memory: 2048.00 MB, peak_memory: 1024.00 MB, \
unexplained_memory: 1.00 MB, offloaded_memory: 1.00 MB
---Layout---
params_layout:
layer: param_mem, layer_mem: 0.00 MB, total_mem: 902.02 MB
layer: param_mem.embedding, layer_mem: 0.00 MB, total_mem: 806.00 MB
layer: param_mem.embedding.weight, layer_mem: 806.00 MB, total_mem: 806.00 MB
layer: param_mem.blocks, layer_mem: 0.00 MB, total_mem: 96.02 MB
layer: param_mem.blocks.0, layer_mem: 0.00 MB, total_mem: 96.02 MB
layer: param_mem.blocks.0.weight, layer_mem: 96.00 MB, total_mem: 96.00 MB
layer: param_mem.blocks.0.bias, layer_mem: 0.02 MB, total_mem: 0.02 MB
grads_layout:
layer: grad_mem, layer_mem: 0.00 MB, total_mem: 0.00 MB
os_params_layout:
layer: os_params_mem, layer_mem: 0.00 MB, total_mem: 0.00 MB
os_state_layout:
layer: os_state_mem, layer_mem: 0.00 MB, total_mem: 1.00 MB
layer: os_state_mem.exp_avg, layer_mem: 1.00 MB, total_mem: 1.00 MB
activation_base_layout:
layer: activation_base, layer_mem: 0.00 MB, total_mem: 0.00 MB

"""


def test_the_log_is_laid_out_as_internlm_does():
    rows = (
        Row("params", "embedding.weight", 806 << 20, "cuda:0"),
        Row("params", "blocks.0.weight", 96 << 20, "cuda:0"),
        Row("params", "blocks.0.bias", 24 << 10, "cuda:0"),
        Row("os_state", "exp_avg", 1 << 20, "cpu"),
        Row("unexplained", "", 1 << 20, "cuda:0"),
    )
    point = TimePoint(0, "step 0 forward", 37.5, "cuda:0", rows, Counts(1 << 30, 1 << 30, 2 << 30, 1 << 30))
    assert log_text(point) == LAYOUT


@pytest.mark.parametrize("other", [object(), nn.Linear(2, 2), [torch.optim.SGD([torch.zeros(1)]), None], "sgd"])
def test_what_is_no_optimizer_is_refused(other, tmp_path):
    with pytest.raises(UsageError, match=r"is not an optimizer: it has no method step\(\)"):
        MemoryProfiler(nn.Linear(8, 8), other, tmp_path)


def under_other_hooks(run: Callable[[], object]) -> None:
    with torch.autograd.graph.save_on_cpu():
        run()


def on_another_thread(run: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


@pytest.mark.skipif(RELEASE < (2, 6), reason="needs PyTorch's function of innermost hooks")
@pytest.mark.parametrize("way", [under_other_hooks, on_another_thread])
def test_activations_out_of_sight_are_a_warning(way, options):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="could not see what autograd keeps in"), MemoryProfiler(model, **options):
        way(lambda: model(torch.randn(4, 8)).sum().backward())


def test_master_copies_have_the_models_paths(options):
    model = mlp().to(torch.bfloat16)
    copies = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1, momentum=0.9)
    for copied in copies:
        copied.grad = torch.ones_like(copied)
    optimizer.step()
    point = begin(model, optimizer, **options)
    assert by_path(point, "params") == {"0.weight": 64, "0.bias": 16, "2.weight": 32, "2.bias": 4}
    assert by_path(point, "os_params") == {"0.weight": 128, "0.bias": 32, "2.weight": 64, "2.bias": 8}
    assert point.sum_of("os_state") == 232


def test_layers_are_read_forward_and_backward_and_drawn(tmp_path):
    model = nn.Sequential(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    profiler = MemoryProfiler(model, optimizer, tmp_path)
    allocated = itertools.count(1000, 10)
    profiler._boundaries = Boundaries(lambda: Counts(size := next(allocated), size, 4096, size))
    with profiler:
        train(model, optimizer, 2)
    assert session.backend is None
    with (profiler.folder / "layers.csv").open() as file:
        rows = list(csv.DictReader(file))
    seen = [(row["step"], row["layer"], row["phase"]) for row in rows]
    assert seen[:4] == [("0", layer, phase) for phase in ("forward", "backward") for layer in ("0", "Sequential")]
    assert len(seen) == 8
    assert all(int(row["end_bytes"]) - int(row["begin_bytes"]) == int(row["retained_bytes"]) > 0 for row in rows)
    assert (profiler.folder / "memory_usage_line_chart.png").read_bytes().startswith(b"\x89PNG")
    assert all(sum(row.bytes for row in point.rows) == point.allocator.allocated for point in profiler.points)


def test_an_entry_that_fails_leaves_nothing(tmp_path):
    class Broken(torch.optim.SGD):
        def register_step_pre_hook(self, _hook: object) -> None:
            raise AttributeError("_optimizer_step_pre_hooks")

    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = Broken(model.parameters(), lr=0.1)
    with pytest.raises(AttributeError):
        MemoryProfiler(model, optimizer, tmp_path).__enter__()
    assert not is_followed(model)
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # newer than torch 2.4
    assert top(False) is None
    with MemoryProfiler(model, None, tmp_path):  # none is "already running"
        pass


def test_a_model_that_nobody_calls_is_a_warning(tmp_path):
    model, other = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="saw no forward of the model"), MemoryProfiler(model, optimizer, tmp_path):
        other(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True, dropout=0.1)
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    return model, {"input": torch.randn(4, 32, 64)}


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32, (2, 12))
    model = transformer("Llama", "ForCausalLM", use_cache=False).model
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def gained(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that the CPU allocator holds more after a call than before, while its result lives; and the result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = recorded.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), result


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [encoder, llama])
def test_to_the_byte(make, mixed, tmp_path):
    torch.manual_seed(0)
    model, inputs = make()

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return model(**inputs)

    forward()
    new_bytes, result = gained(forward)
    del result
    with MemoryProfiler(model, None, tmp_path, pages=False) as profiler:
        result = forward()
    forward_end = profiler.points[1]
    # the inputs were there before; those that autograd keeps are among the activations
    saved_inputs = sum(tensor.nbytes for tensor in inputs.values()) - forward_end.sum_of("inputs")
    assert forward_end.sum_of("activation", "outputs") - saved_inputs == new_bytes
    assert result is not None


def test_a_whole_step_to_the_byte(options):
    model, inputs = encoder()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**inputs).square().mean().backward()
        optimizer.step()

    new_bytes, _ = gained(step)  # gradients and the optimizer's state, which both stay
    point = begin(model, optimizer, **options)
    assert point.sum_of("grads", "os_state") == new_bytes
    assert point.sum_of("params") == sum(weight.nbytes for weight in model.parameters())


def test_unknown_memory_is_told_by_its_size_and_adds_up(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    sizes = [(0x1000, 512, 400), (0x2000, 32 * MIB, 32 * MIB), (0x4000000, 32 * MIB, 32 * MIB), (0x8001000, 512, 8)]
    sizes += [(0x8000000 + 0x400 * number, 1024, 1024) for number in range(4)]
    blocks = [dict(zip(("address", "size", "requested_size"), block, strict=True)) for block in sizes]
    ledger = Ledger()
    ledger.addresses = {0x1000}  # of a known tensor
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False), nn.Linear(32, 32, bias=False))
    counts = Counts(64 * MIB + 5000, 64 * MIB + 4500, 0, 0)
    known = [Row("params", "0.weight", 500, "cpu"), Row("params", "2.weight", 999, "cuda:1")]
    with torch.autocast("cpu", torch.bfloat16):
        rows = allocator.unknown_rows(known, ledger, model=model, device=CPU, counts=counts, blocks=blocks)
    assert rows == [
        Row("rounding", "", 500, "cpu"),
        Row("workspace", "cublas", 64 * MIB, "cpu"),
        Row("autocast", "0.weight", 1024, "cpu"),
        Row("autocast", "1.weight", 1024, "cpu"),
        Row("unexplained", "2 of 1024 bytes", 2048, "cpu"),
        Row("unexplained", "1 of 8 bytes", 8, "cpu"),
        Row("unexplained", "", 4500 - 500 - 4 * 1024 - 8, "cpu"),  # negative: known tensors that are in no block
    ]
    assert sum(row.bytes for row in [*known[:1], *rows]) == counts.allocated


def test_the_largest_allocation_of_each_call():
    memory = Allocator()
    history = History(1, memory)
    boundaries = Boundaries(lambda: Counts(100, 100, 4096, 100), history)
    history.start()
    model, part = session.Range("model", Category.FORWARD), session.Range("model.a", Category.FORWARD)
    memory.alloc(999)  # in no layer
    boundaries.entered(model)
    memory.alloc(10)
    boundaries.entered(part)
    memory.alloc(70)
    memory.alloc(30)
    boundaries.left(part)
    boundaries.settle()  # a time point between: the model's call has not ended
    memory.alloc(20)
    boundaries.left(model)
    boundaries.entered(part)
    boundaries.left(part)
    memory.alloc(999)
    boundaries.counts()
    assert [(b.layer, b.largest) for b in boundaries.seen] == [("model.a", 70), ("model", 70), ("model.a", 0)]
    history.stop()
    assert (memory.labels[-1], memory.recording[-1]) == ("", None)
    boundaries.entered(part)
    boundaries.left(part)
    boundaries.settle()
    assert boundaries.seen[-1].largest is None


@pytest.mark.parametrize(
    ("capability", "setting", "size"),
    [
        ((9, 0), "", 32 * MIB),
        ((8, 0), "", 8 * MIB + 128 * 1024),
        ((9, 0), ":4096:2:16:8", 8 * MIB + 128 * 1024),
        ((9, 0), ":0:0", 0),
        ((9, 0), "nonsense", 32 * MIB),
    ],
)
def test_the_size_of_a_workspace(capability, setting, size):
    assert allocator.workspace_bytes(capability, {"CUBLAS_WORKSPACE_CONFIG": setting}) == size


def test_what_autocast_may_have_cast():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    for options, weights in (({}, [("0.weight", 4 * 8 * 2)]), ({"cache_enabled": False}, []), ({"enabled": False}, [])):
        with torch.autocast("cpu", torch.bfloat16, **options):
            assert list(allocator.cast_weights(model, CPU)) == weights
