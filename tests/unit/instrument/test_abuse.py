"""Modules used in ways that nobody planned: shared, called past ``__call__``, copied, exported, on many threads."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.model_zoo import TOKENS, Net
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import nvprof_kit
from nvprof_kit import annotate_model, instrument_method, layer_range, mark, phase, step
from nvprof_kit.errors import UsageError
from nvprof_kit.names import encodable


def bare(sink) -> list[str]:
    return [line.strip() for line in sink.lines]


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize("places", [1, 2])
def test_a_keyboard_interrupt_in_a_hook_leaves_nothing_open_in_the_next_step(places, kind, sink):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    annotate_model(model, depth="leaf")

    def interrupt(*_call) -> None:
        raise KeyboardInterrupt

    registers = [getattr(place, f"register_{kind}_hook") for place in (model[0][1], model[1])[:places]]
    for register in [*registers, getattr(modules, f"register_module_{kind}_hook")]:
        hook = register(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        hook.remove()
        sink.lines.clear()
    model(torch.ones(1, 2)).sum().backward()
    assert sink.lines[-1].strip() == "0.0 backward"


def test_hooks_of_others_come_and_go_while_it_runs(sink):
    model = Net()
    handle = annotate_model(model, depth=1)
    theirs = []

    def add(module, _args) -> None:
        theirs.append(module.register_forward_hook(lambda *_: None))
        theirs.append(module.register_forward_pre_hook(lambda *_: None, prepend=True))

    adding = model.layers[0].register_forward_pre_hook(add)
    model(TOKENS).sum().backward()
    for hook in theirs:
        hook.remove()
    adding.remove()
    removing = model.layers[1].register_forward_pre_hook(lambda *_: handle.remove())
    model(TOKENS).sum().backward()
    removing.remove()
    annotate_model(model, depth=1)
    sink.lines.clear()
    model(TOKENS).sum().backward()
    assert sink.lines[:2] == ["Net", "  embed"]


def test_replicas_on_many_threads(sink):
    model = Net()
    annotate_model(model, depth=1)
    together = threading.Barrier(4)

    def run(replica: nn.Module) -> None:
        together.wait()
        for _ in range(5):
            replica(TOKENS, order=(1, 0, 1)).sum().backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, [model._replicate_for_data_parallel() for _ in range(4)]))
    assert bare(sink).count("layers.1") == bare(sink).count("layers.1 backward") == 4 * 5 * 2
    assert list(sink.threads.values()) == [0] * 4


def test_a_replica_calls_itself(sink):
    model = nn.Linear(2, 2)
    annotate_model(model)
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 2), torch.zeros(2)
    assert torch.equal(replica(torch.ones(1, 2)), torch.zeros(1, 2))
    assert sink.lines == ["Linear"]


def test_a_scripted_model_is_the_bare_one(sink):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with annotate_model(model, depth="leaf"):
        scripted = torch.jit.script(model)
        sink.lines.clear()
        assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert sink.lines == ["Sequential", "  0", "  1"]


class Nest(nn.Module):
    """Blocks checkpointed one by one inside a half of the model that is checkpointed as a whole."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4))
        self.reentrant = reentrant

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers[index], x, use_reentrant=self.reentrant)

    def half(self, first: int, x: torch.Tensor) -> torch.Tensor:
        return self.block(first + 1, self.block(first, x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 2):
            x = checkpoint(self.half, first, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints(reentrant, early_stop, sink):
    model = Nest(reentrant)
    annotate_model(model)
    x = torch.ones(2, 4, requires_grad=True)
    with set_checkpoint_early_stop(early_stop):
        model(x).sum().backward()
    lines = bare(sink)
    for index in range(4):
        assert lines.count(f"layers.{index}") == 1
        assert lines.count(f"layers.{index} backward") >= 1
        recomputes = lines.count(f"layers.{index} recompute")
        assert 1 <= recomputes <= 2, "once for the half, once for the block"
    assert lines.index("layers.3 recompute") < lines.index("layers.1 recompute")


def test_forward_called_by_hand(sink):
    model = Net()
    with annotate_model(model, depth=1), instrument_method(model.layers[0]), instrument_method(Net, "encode"):
        model.encode(TOKENS).sum().backward()
        assert sink.lines[:3] == ["Net.encode", "  embed", "  layers.0"]
        assert "layers.0 backward" in bare(sink)
        sink.lines.clear()
        model(TOKENS)
        assert bare(sink) == ["Net", "embed", "layers.0", "layers.1", "norm", "same", "head"], "a call is ranged once"
        sink.lines.clear()
        model.layers[1].forward(model.embed(TOKENS))
        assert bare(sink) == ["embed"], "only the one instance"
        with pytest.raises(TypeError):
            model.layers[0].forward()
        assert sink.open_count() == 0
    sink.lines.clear()
    model.encode(TOKENS)
    assert sink.lines == []
    assert Net.encode.__qualname__ == "Net.encode"
    assert "__wrapped__" not in vars(Net.encode)
    assert "__wrapped__" not in vars(nn.TransformerEncoderLayer.forward)


def test_an_inherited_method_and_what_is_none(sink):
    class Child(Net):
        pass

    child = Child()
    handle = instrument_method(child, "encode")
    Net().encode(TOKENS)
    assert sink.lines == []
    child.encode(TOKENS)
    assert bare(sink) == ["Child.encode"]
    handle.remove()
    handle.remove()
    assert "encode" not in vars(Child)
    for target, name in ((child, "nothing"), (child, "training"), (object(), "forward"), (int, "bit_length")):
        with pytest.raises(UsageError):
            instrument_method(target, name)


NAME, WRITTEN = "a\ud800b\udcff", "a&#55296;b&#56575;"


class Odd(nn.Module):
    """Its parts have names that nobody can write."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self._modules[NAME]:
            x = block(x)
        return x


def loop(model: nn.Module) -> None:
    """Every way to give a name."""
    double = layer_range(NAME)(lambda x: 2 * x)
    with step(0), phase(NAME), layer_range(NAME):
        mark(NAME)
        layer_range.end(layer_range.start(NAME))
        (double(model(torch.ones(1, 2, requires_grad=True))) * 1).sum().backward()


def test_every_name_reaches_the_tool_with_a_number_in_place(sink):
    model = Odd()
    with annotate_model(model):
        loop(model)
    assert {line.strip() for line in sink.lines} >= {WRITTEN, f"mark {WRITTEN}", f"start {WRITTEN}", f"{WRITTEN}.0"}
    assert all(line == encodable(line) for line in sink.lines)


@pytest.mark.parametrize("kinds", [None, {f"{NAME}.*": NAME}])
def test_the_files_have_them(kinds, tmp_path):
    model = Odd()
    options = dict(folder=tmp_path, kinds=kinds, name=NAME, plots=False, echo=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nvprof_kit.LayerProfiler(model, "0:1", **options) as profiling:
            loop(model)
            profiling.step()
    counting = nvprof_kit.count_flops(tmp_path / "run.flops.json")
    with annotate_model(model), nvprof_kit.record(tmp_path / "run.json"), counting:
        loop(model)
    assert len(profiling.recorded) == 1
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".csv", ".json")]
    assert {path.name for path in files if WRITTEN in path.read_text()} >= {"run.json", "run.flops.json"}
    assert any(WRITTEN in path.read_text() for path in files if path.suffix == ".csv"), files
