"""Rules: what a range is by its text, from a file of the user's or a preset."""

from __future__ import annotations

import pytest

from nvprof_kit._analysis.foreign.rules import parse_rules, preset
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category, RangeName

LAYER, BACKWARD, PHASE, STEP, NOTHING = (
    Category.FORWARD,
    Category.BACKWARD,
    Category.PHASE,
    Category.STEP,
    Category.USER,
)

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
        ("fwd/model.layers.3.mlp", None, RangeName("model.layers.3.mlp", LAYER)),
        ("bwd/3/mlp", None, RangeName("layers.3.mlp", BACKWARD)),
        ("it12", None, RangeName("step 12", STEP)),
        ("allreduce", None, RangeName("allreduce", PHASE)),
        ("noise of any kind", None, RangeName("noise of any kind", NOTHING)),
        ("layers.1 #77", None, RangeName("layers.1", LAYER)),
        ("anything", "module", RangeName("by category", LAYER)),
        ("anything", None, RangeName("anything", NOTHING)),  # otherwise = "nothing" unless said
        ("model.layers.3 backward", "backward", RangeName("model.layers.3", BACKWARD)),  # what we emitted keeps it
        ("fwd/", None, RangeName("fwd/", NOTHING)),  # the whole text must match
    ],
)
def test_a_file_of_rules(text: str, category: str | None, expected: RangeName) -> None:
    assert parse_rules(OWN, "own.toml").meaning(text, category).name == expected


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
def test_a_wrong_file_is_told_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as error:
        parse_rules(text, "own.toml")
    assert "\n" not in str(error.value)


SHAPES = "'TrainableParams': {'weight': [64, 64]}, 'Inputs': [[8, 64]]"
OUTPUTS = "'TrainableParams': {'weight': [64, 64]}, 'Outputs': [[8, 64]]"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("vllm", f"{{'Module': 'LlamaForCausalLM.model.layers.0.mlp', {SHAPES}}}",
         RangeName("LlamaForCausalLM.model.layers.0.mlp", LAYER)),
        ("vllm", f"{{'Module': 'LlamaForCausalLM.model.layers.0.mlp', {OUTPUTS}}}", NOTHING),
        ("vllm", "{'Module': 'LlamaForCausalLM', 'input_ids': [512]}", RangeName("LlamaForCausalLM", LAYER)),
        ("vllm", "{'Module': 'Torch Compiled Module (input):LlamaModel'}", RangeName("LlamaModel", LAYER)),
        ("vllm", "gpu_model_runner: sample", RangeName("sample", PHASE)),
        ("vllm", "execute_context_2(512)_generation_64(64)",
         RangeName("execute_context_2(512)_generation_64(64)", STEP)),
        ("vllm", "execute_new_2_cached_64", RangeName("execute_new_2_cached_64", STEP)),
        ("vllm", "execute_576_context_2(sq512)_generation_64(sq64)",
         RangeName("execute_576_context_2(sq512)_generation_64(sq64)", STEP)),
        ("vllm", "schedule: allocate_slots", RangeName("allocate_slots", PHASE)),
        ("tensorrt-llm", "[Executor] _forward_step 12: 3 ctx reqs, 29 gen reqs", RangeName("step 12", STEP)),
        ("tensorrt-llm", "[Executor] _forward_step 12: 0 ctx reqs, 0 ctx tokens, 32 gen reqs",
         RangeName("step 12", STEP)),
        ("tensorrt-llm", "[Executor] _forward_step: 3 ctx reqs, 29 gen reqs",
         RangeName("[Executor] _forward_step: 3 ctx reqs, 29 gen reqs", STEP)),
        ("tensorrt-llm", "_prepare_inputs", RangeName("prepare_inputs", PHASE)),
        ("tensorrt-llm", f"{{'Module': 'top.model.layers.0.mlp', {SHAPES}}}",
         RangeName("top.model.layers.0.mlp", LAYER)),
        ("deepspeed", "DeepSpeedEngine.forward", RangeName("forward", PHASE)),
        ("deepspeed", "DeepSpeedEngine.backward", RangeName("backward", PHASE)),
        ("deepspeed", "DeepSpeedEngine.step", RangeName("optimizer", PHASE)),
        ("deepspeed", "PartitionedParameterCoordinator.fetch_sub_module",
         RangeName("PartitionedParameterCoordinator.fetch_sub_module", PHASE)),
        ("deepspeed", "DeepSpeedZeroOptimizer_Stage3.step", RangeName("DeepSpeedZeroOptimizer_Stage3.step", PHASE)),
        ("deepspeed", "model.layers.0", RangeName("model.layers.0", LAYER)),
        ("sglang", f"{{'Module': 'model.layers.0.self_attn.qkv_proj', {SHAPES}}}",
         RangeName("model.layers.0.self_attn.qkv_proj", LAYER)),
        ("megatron-lm", "megatron.core.transformer.transformer_layer._forward_attention.self_attention",
         RangeName("transformer_layer.self_attention", LAYER)),
        ("megatron-lm", "megatron.core.transformer.mlp.forward.linear_fc1", RangeName("mlp.linear_fc1", LAYER)),
        ("megatron-lm", "megatron.core.transformer.mlp.forward.activation", RangeName("mlp.activation", LAYER)),
        ("megatron-lm", "megatron.core.transformer.attention.forward.qkv", RangeName("attention.qkv", LAYER)),
        ("megatron-lm", "megatron.core.transformer.transformer_layer._forward_attention.self_attn_bda",
         RangeName("transformer_layer.self_attn_bda", LAYER)),
        ("megatron-lm", "megatron.core.fusions.fused_bias_swiglu.backward", RangeName("fused_bias_swiglu", BACKWARD)),
        ("megatron-lm", "megatron.core.pipeline_parallel.schedules.forward_step",
         RangeName("schedules.forward_step", PHASE)),
        ("megatron-lm", "layer_3f-layer_28b", RangeName("forward and backward overlapped", PHASE)),
        ("nemo", "megatron.core.transformer.mlp.forward.linear_fc2", RangeName("mlp.linear_fc2", LAYER)),
        ("nemo", "Optimizer.step#FusedAdam.step, op_id = 77", RangeName("optimizer", PHASE)),
        ("torch-nvtx", "model.layers.0", RangeName("model.layers.0", LAYER)),
        ("torch-nvtx", "Layer 3", RangeName("layers.3", LAYER)),
        ("torch-nvtx", "layer_3 bwd", RangeName("layers.3", BACKWARD)),
        ("torch-nvtx", "Batch 7", RangeName("step 7", STEP)),
        ("torch-nvtx", "backward", RangeName("backward", PHASE)),
        ("emit-nvtx", "model.layers.0, op_id = 3", RangeName("model.layers.0", LAYER)),  # a record_function
        ("emit-nvtx", "step 4, op_id = 3", RangeName("step 4", STEP)),
        ("emit-nvtx", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__, op_id = 9",
         RangeName("data", PHASE)),
        ("emit-nvtx", "MmBackward0, seq = 5, op_id = 18", NOTHING),
    ],
)  # fmt: skip
def test_presets(name: str, text: str, expected: RangeName | Category) -> None:
    meaning = preset(name).meaning(text).name
    assert meaning == expected if isinstance(expected, RangeName) else meaning.category is expected
