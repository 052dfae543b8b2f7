"""Rules: what a range is by its text, from a file of the user's or a preset."""

import pytest

from nvprof_kit._analysis.foreign.rules import parse_rules, preset
from nvprof_kit.errors import UsageError

OWN = """
title = "our trainer"
domain = "trainer"

[[rule]]
match = 'fwd/(?P<layer>[\\w.]+)'

[[rule]]
match = 'bwd/(?P<number>\\d+)/(?P<part>\\w+)'
layer = "layers.{number}.{part}"
phase = "backward"

[[rule]]
match = 'it(?P<step>\\d+)'

[[rule]]
match = '(?P<phase>allreduce|load)'

[[rule]]
match = 'noise.*'

[[rule]]
match = '(?P<plain>.+) #\\d+'

[[rule]]
match = 'op (?P<sequence>\\d+)'
operator = "forward"

[[rule]]
match = '.*'
category = "module"
layer = "by category"
"""


@pytest.mark.parametrize(
    ("text", "category", "expected"),
    [
        ("fwd/model.layers.3.mlp", None, "forward model.layers.3.mlp"),
        ("bwd/3/mlp", None, "backward layers.3.mlp"),
        ("it12", None, "step step 12"),
        ("allreduce", None, "phase"),
        ("noise of any kind", None, "user"),
        ("layers.1 #77", None, "forward layers.1"),
        ("anything", "module", "forward by category"),
        ("anything", None, "user"),  # otherwise = "nothing" unless said
        ("model.layers.3 backward", "backward", "backward model.layers.3"),  # what we emitted keeps it
        ("fwd/", None, "user"),  # the whole text must match
    ],
)
def test_a_file_of_rules(text, category, expected):
    assert_meaning(parse_rules(OWN, "own.toml").meaning(text, category).name, text, expected)


def assert_meaning(name, text, expected):
    """Expected are a category, and the text unless it stays."""
    category, _, changed = expected.partition(" ")
    assert (name.category.value, name.text) == (category, changed or text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[rule]\n", "not TOML"),
        ("title = 'x'", r"no \[\[rule\]\] in it"),
        ("[[rule]]\nlayer = 'x'", "rule 1: lacks match"),
        ("[[rule]]\nmatch = '('", r"rule 1: '\(' is not a regular expression"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{b}'", "rule 1: layer = '{b}' names an unknown group"),
        ("[[rule]]\nmatch = '.'\nlayr = 'x'", "rule 1: unknown key 'layr'"),
        ("[[rule]]\nmatch = '.'\nlayer = 'x'\nphase = 'fwd'", "rule 1: phase = 'fwd'"),
        ("[[rule]]\nmatch = '.'\nlayer = 3", "rule 1: layer = 3; every value must be a text"),
        ("[[rule]]\nmatch = '.'\noperator = 'x'", "rule 1: operator = 'x'"),
        ("otherwise = 'x'\n[[rule]]\nmatch = '.'", "otherwise = 'x'"),
        ("include = ['x']", "no preset 'x'; available: deepspeed, emit-nvtx"),
        ("include = 'vllm'", "include = 'vllm'; needed a list of texts"),
        ("sources = 5\n[[rule]]\nmatch = '.'", "sources = 5; needed a list of texts"),
        ("domain = 5\n[[rule]]\nmatch = '.'", "domain = 5; needed a text in quotes"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a.b}'", "rule 1: layer = '{a.b}' names an unknown group"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a.__class__}'", "names an unknown group"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a:>999999999}'", "names an unknown group"),
        ("[[rule]]\nmatch = '(?P<a>.)'\nlayer = '{a!r}'", "names an unknown group"),
        ("a = " + "[" * 5000, "not TOML: lists or tables inside each other too deep"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text, complaint):
    with pytest.raises(UsageError, match=complaint) as error:
        parse_rules(text, "own.toml")
    assert "\n" not in str(error.value)


def module(path: str, side: str = "Inputs") -> str:
    """What PyTorch's hooks of vLLM and others write: the module, its weights and its inputs or outputs."""
    return f"{{'Module': '{path}', 'TrainableParams': {{'weight': [64, 64]}}, '{side}': [[8, 64]]}}"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("vllm", module("LlamaForCausalLM.model.layers.0.mlp"), "forward LlamaForCausalLM.model.layers.0.mlp"),
        ("vllm", module("LlamaForCausalLM.model.layers.0.mlp", "Outputs"), "user"),
        ("vllm", "{'Module': 'LlamaForCausalLM', 'input_ids': [512]}", "forward LlamaForCausalLM"),
        ("vllm", "{'Module': 'Torch Compiled Module (input):LlamaModel'}", "forward LlamaModel"),
        ("vllm", "gpu_model_runner: sample", "phase sample"),
        ("vllm", "execute_context_2(512)_generation_64(64)", "step"),
        ("vllm", "execute_new_2_cached_64", "step"),
        ("vllm", "execute_576_context_2(sq512)_generation_64(sq64)", "step"),
        ("vllm", "schedule: allocate_slots", "phase allocate_slots"),
        ("tensorrt-llm", "[Executor] _forward_step 12: 3 ctx reqs, 29 gen reqs", "step step 12"),
        ("tensorrt-llm", "[Executor] _forward_step 12: 0 ctx reqs, 0 ctx tokens, 32 gen reqs", "step step 12"),
        ("tensorrt-llm", "[Executor] _forward_step: 3 ctx reqs, 29 gen reqs", "step"),
        ("tensorrt-llm", "_prepare_inputs", "phase prepare_inputs"),
        ("tensorrt-llm", module("top.model.layers.0.mlp"), "forward top.model.layers.0.mlp"),
        ("deepspeed", "DeepSpeedEngine.forward", "phase forward"),
        ("deepspeed", "DeepSpeedEngine.backward", "phase backward"),
        ("deepspeed", "DeepSpeedEngine.step", "phase optimizer"),
        ("deepspeed", "PartitionedParameterCoordinator.fetch_sub_module", "phase"),
        ("deepspeed", "DeepSpeedZeroOptimizer_Stage3.step", "phase"),
        ("deepspeed", "model.layers.0", "forward"),
        ("sglang", module("model.layers.0.self_attn.qkv_proj"), "forward model.layers.0.self_attn.qkv_proj"),
        ("megatron-lm", "megatron.core.transformer.transformer_layer._forward_attention.self_attention",
         "forward transformer_layer.self_attention"),
        ("megatron-lm", "megatron.core.transformer.mlp.forward.linear_fc1", "forward mlp.linear_fc1"),
        ("megatron-lm", "megatron.core.transformer.mlp.forward.activation", "forward mlp.activation"),
        ("megatron-lm", "megatron.core.transformer.attention.forward.qkv", "forward attention.qkv"),
        ("megatron-lm", "megatron.core.transformer.transformer_layer._forward_attention.self_attn_bda",
         "forward transformer_layer.self_attn_bda"),
        ("megatron-lm", "megatron.core.fusions.fused_bias_swiglu.backward", "backward fused_bias_swiglu"),
        ("megatron-lm", "megatron.core.pipeline_parallel.schedules.forward_step", "phase schedules.forward_step"),
        ("megatron-lm", "layer_3f-layer_28b", "phase forward and backward overlapped"),
        ("nemo", "megatron.core.transformer.mlp.forward.linear_fc2", "forward mlp.linear_fc2"),
        ("nemo", "Optimizer.step#FusedAdam.step, op_id = 77", "phase optimizer"),
        ("torch-nvtx", "model.layers.0", "forward"),
        ("torch-nvtx", "Layer 3", "forward layers.3"),
        ("torch-nvtx", "layer_3 bwd", "backward layers.3"),
        ("torch-nvtx", "Batch 7", "step step 7"),
        ("torch-nvtx", "backward", "phase"),
        ("emit-nvtx", "model.layers.0, op_id = 3", "forward model.layers.0"),  # a record_function
        ("emit-nvtx", "step 4, op_id = 3", "step step 4"),
        ("emit-nvtx", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__, op_id = 9", "phase data"),
        ("emit-nvtx", "MmBackward0, seq = 5, op_id = 18", "user MmBackward0"),
    ],
)  # fmt: skip
def test_presets(name, text, expected):
    assert_meaning(preset(name).meaning(text).name, text, expected)
