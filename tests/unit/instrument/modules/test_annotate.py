"""`annotate_model`: what it ranges, and what its handle does."""

import builtins

import pytest
import torch
from support.model_zoo import TOKENS, Net, make
from torch import nn

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model, layer_range
from nvprof_kit.errors import UsageError


def ranged(model: nn.Module) -> int:
    """How many modules have a call with something around it; none of them has a hook."""
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return sum("_compiled_call_impl" in vars(module) for module in model.modules())


def test_default_selection():
    paths = annotate_model(Net()).paths
    assert paths[:4] == ("Net", "embed", "layers.0", "layers.0.self_attn")
    assert {"layers.1.norm2", "norm", "head", "unused"} <= set(paths)
    assert "same" not in paths
    assert "layers.0.self_attn.out_proj" not in paths


def test_default_selection_goes_around_the_blocks():
    assert annotate_model(make("llama").model).paths == (
        "LlamaForCausalLM",
        "model",
        "model.embed_tokens",
        *(
            f"model.layers.{index}{part}"
            for index in range(3)
            for part in ("", ".self_attn", ".mlp", ".input_layernorm", ".post_attention_layernorm")
        ),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    )
    paths = annotate_model(make("t5").model).paths
    assert "encoder.block.0.layer.1" in paths
    assert "decoder.final_layer_norm" in paths


def test_model_without_blocks():
    assert annotate_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).paths == ("Sequential", "0", "1")


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (nn.LayerNorm, ("layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm")),
        ((nn.Embedding, nn.MultiheadAttention), ("embed", "layers.0.self_attn", "layers.1.self_attn")),
        ("layers.?", ("layers.0", "layers.1")),
        (["*.linear1", "head"], ("layers.0.linear1", "layers.1.linear1", "head")),
        (lambda path, module: path.count(".") == 1 and hasattr(module, "linear1"), ("layers.0", "layers.1")),
    ],
)
def test_select(select, expected):
    assert annotate_model(Net(), select=select).paths == expected


def test_depth():
    assert annotate_model(Net(), depth=0).paths == ("Net",)
    paths = "net embed layers.0 layers.1 norm same head unused"
    assert annotate_model(Net(), depth=1, root="net").paths == tuple(paths.split())
    assert "layers.0.self_attn.out_proj" in annotate_model(Net(), depth="leaf").paths


def test_usage_errors():
    net = Net()
    for options in ({"select": "x", "depth": 1}, {"select": "nowhere.*"}, {"depth": "deep"}, {"depth": -1}):
        with pytest.raises(UsageError):
            annotate_model(net, **options)
    handle = annotate_model(net)
    with pytest.raises(UsageError, match="already annotated"):
        annotate_model(net)
    handle.remove()
    handle.remove()
    with annotate_model(net):
        pass
    annotate_model(net).remove()


def test_nothing_is_installed_while_nobody_listens(sink):
    session.deactivate()
    net = Net()
    handle = annotate_model(net)
    assert ranged(net) == 0
    session.activate(sink)
    assert ranged(net) == len(handle.paths)
    net(TOKENS)
    session.deactivate()
    assert ranged(net) == 0
    seen = len(sink.lines)
    net(TOKENS)
    assert len(sink.lines) == seen > 0
    session.activate(sink)
    handle.remove()
    assert ranged(net) == 0


def test_shared_modules_bear_their_first_path(sink):
    net = Net()
    net.layers[1] = net.layers[0]
    handle = annotate_model(net)
    assert handle.aliases["layers.1"] == "layers.0"
    net(TOKENS).sum().backward()
    assert [line.strip() for line in sink.lines].count("layers.0") == 2
    assert [line.strip() for line in sink.lines].count("layers.0 backward") == 2


def test_wrappers_do_not_show(sink):
    net = Net()
    wrapper = nn.Module()
    wrapper.module = net
    wrapper.forward = net.__call__
    handle = annotate_model(wrapper)
    assert handle.paths[:3] == ("Net", "embed", "layers.0")
    wrapper(TOKENS)
    assert sink.lines[:2] == ["Net", "  embed"]


def test_decorated_class_in_an_annotated_model_is_ranged_once(sink):
    @layer_range
    class Block(nn.Linear):
        pass

    net = nn.Sequential(Block(2, 2), nn.ReLU())
    with annotate_model(net):
        net(torch.ones(1, 2))
    assert sink.lines == ["Sequential", "  0", "  1"]
    net(torch.ones(1, 2))
    assert sink.lines[3:] == ["Block.0"]


def test_a_cell_of_ipython_run_again_replaces_what_it_annotated(sink, monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)  # which the shell sets, and leaves
    monkeypatch.setattr(builtins, "get_ipython", None, raising=False)
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    cells = [
        "import torch\nfrom torch import nn\nfrom nvprof_kit import annotate_model, annotate_optimizer",
        "net = nn.Sequential(nn.Linear(2, 2))\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        "first = annotate_model(net)\nannotate_optimizer(optimizer)",
        "handle = annotate_model(net, depth=0)\nannotate_optimizer(optimizer)",
        "first.remove()  # takes nothing of the second back",
        "net(torch.zeros(1, 2)).sum().backward()\noptimizer.step()",
    ]
    for cell in cells:
        shell.run_cell(cell).raise_error()
    assert sink.lines == ["Sequential", "Sequential backward", "optimizer"]  # once, and with the later options
