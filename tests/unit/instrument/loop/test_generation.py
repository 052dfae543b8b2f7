"""Inference as steps: prefill, then decode, in the loops people run."""

from __future__ import annotations

import pytest
import torch

from nvprof_kit import annotate_model, generation


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return LlamaForCausalLM(config).eval()


def top(sink) -> list[str]:
    """The ranges down to the phases, and the model's."""
    return [line for line in sink.lines if line.startswith(("step", "  prefill", "  decode", "    Llama"))]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_a_prefill_and_decode_steps(sink, llama, cache: str) -> None:
    prompt = torch.randint(0, 50, (2, 7))
    expected = llama.generate(prompt, max_new_tokens=3, do_sample=False, cache_implementation=cache)
    with annotate_model(llama), generation(llama):
        found = llama.generate(prompt, max_new_tokens=3, do_sample=False, cache_implementation=cache)
    assert torch.equal(found, expected)
    assert top(sink) == [
        *("step 0", "  prefill", "    LlamaForCausalLM"),
        *("step 1", "  decode", "    LlamaForCausalLM"),
        *("step 2", "  decode", "    LlamaForCausalLM"),
    ]
    assert sum("backward" in line or "recompute" in line for line in sink.lines) == 0


@pytest.mark.parametrize(("prompt", "first"), [([[0, 5, 6]], "prefill"), ([[0]], "decode")])
def test_of_an_encoder_decoder_the_decoders_prompt_counts(sink, prompt: list[list[int]], first: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ).eval()
    with generation(model):
        model.generate(
            torch.ones(1, 9).long(), decoder_input_ids=torch.tensor(prompt), max_new_tokens=2, min_new_tokens=2
        )
    assert [line for line in sink.lines if "step" not in line] == [f"  {first}", "  decode"]
