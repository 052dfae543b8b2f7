"""Inference as steps: prefill, then decode, in the loops people run."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.model_zoo import make, small
from torch import nn
from torch.utils.data import DataLoader

from nvprof_kit import annotate_model, generation, global_timer, phase, step
from nvprof_kit.errors import UsageError


def top(sink) -> list[str]:
    """The ranges down to the phases, and the model's."""
    return [line for line in sink.lines if line.startswith(("step", "  prefill", "  decode", "    Llama"))]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_a_prefill_and_decode_steps(sink, cache):
    llama = make("llama").model.eval()
    prompt = torch.randint(0, 32, (2, 7))
    options = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False, cache_implementation=cache)
    expected = llama.generate(prompt, **options)
    with annotate_model(llama), generation(llama):
        found = llama.generate(prompt, **options)
    assert torch.equal(found, expected)
    assert top(sink) == [
        *("step 0", "  prefill", "    LlamaForCausalLM"),
        *("step 1", "  decode", "    LlamaForCausalLM"),
        *("step 2", "  decode", "    LlamaForCausalLM"),
    ]
    assert sum("backward" in line or "recompute" in line for line in sink.lines) == 0


@pytest.mark.parametrize(("prompt", "first"), [([[0, 5, 6]], "prefill"), ([[0]], "decode")])
def test_of_an_encoder_decoder_the_decoders_prompt_counts(sink, prompt, first):
    model = make("t5").model.eval()
    with generation(model):
        model.generate(
            torch.ones(1, 9).long(), decoder_input_ids=torch.tensor(prompt), max_new_tokens=2, min_new_tokens=2
        )
    assert [line for line in sink.lines if "step" not in line] == [f"  {first}", "  decode"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 2, accumulation: int = 1) -> None:
    loader = iter(DataLoader(torch.randn(steps * accumulation * 2, 4), batch_size=2))
    for _ in range(steps):
        for _ in range(accumulation):
            model(next(loader)).sum().backward()
        if optimizer is None:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad)
        else:
            optimizer.step()
        model.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def infer(model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(3):
            model.eval()(torch.ones(2, 4))


def evaluate_between(model: nn.Module) -> None:
    optimizer = sgd(model)
    train(model, optimizer, steps=1)
    infer(model)
    train(model.train(), optimizer, steps=1)


def step_by_hand(model: nn.Module) -> None:
    model(torch.ones(2, 4))  # before the loop, as to build lazy parts
    optimizer = sgd(model)
    for number in range(10, 12):
        with step(number):
            train(model, optimizer, steps=1)


def generate(model: nn.Module) -> None:
    with generation(model, first=5):
        model(torch.ones(2, 4))


LOOPS: dict[str, tuple[Callable[[nn.Module], None], list[str]]] = {
    "training": (lambda model: train(model, sgd(model), steps=3), ["step 0", "step 1", "step 2"]),
    "accumulation": (lambda model: train(model, sgd(model), steps=2, accumulation=3), ["step 0", "step 1"]),
    "an update by hand": (lambda model: train(model, None, steps=2), ["step 0", "step 1"]),
    "evaluation between": (evaluate_between, ["step 0", "step 1"]),
    "inference": (infer, ["step 0", "step 1", "step 2"]),
    "steps of the program": (step_by_hand, ["step 0", "step 10", "step 11"]),
    "generation": (generate, ["step 5"]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_steps_are_inferred(name, heard):
    run, steps = LOOPS[name]
    model = small()
    with annotate_model(model):
        run(model)
    assert [line for line in heard.outline if "prefill" not in line] == steps
    assert "Sequential" in heard.layers


@pytest.mark.parametrize("timed", [False, True])
def test_steps_are_around_the_phases_of_the_program(timed, heard, tmp_path):
    stage: Callable[[str], Any] = type(global_timer)(tmp_path).stage if timed else phase
    model = small()
    optimizer = sgd(model)
    with annotate_model(model):
        for _ in range(2):
            with stage("pass"), stage("forward"):
                loss = model(torch.ones(2, 4)).sum()
            with stage("backward"):
                loss.backward()
            with stage("optimizer"):
                optimizer.step()
    of_step = ["  pass", "    forward", "  backward", "  optimizer"]
    begun = ["pass", "  forward"]  # before the model's call, which begins the step, and ends the one before
    assert heard.outline == [*begun, "step 0", *of_step, "  pass", "    forward", *begun, "step 1", *of_step]


def test_a_model_that_is_annotated_within_a_step_begins_no_other(heard):
    model = small()
    with step(3), annotate_model(model):
        model(torch.ones(2, 4))
    assert heard.outline == ["step 3"]


def test_two_models_of_a_loop_share_its_steps(heard):
    first, second = small(), small()
    with annotate_model(first), annotate_model(second):
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for _ in range(2):
            second(first(torch.ones(2, 4))).sum().backward()
            optimizer.step()
    assert heard.outline == ["step 0", "step 1"]


@pytest.mark.parametrize("gone", ["removed", "steps=False", "collected"])
def test_nothing_is_inferred_any_more(gone, heard):
    model = small()
    annotation = annotate_model(model, steps=gone != "steps=False")
    if gone == "removed":
        annotation.remove()
    if gone == "collected":
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None
        model = small()
    train(model, sgd(model))
    annotation.remove()
    assert heard.outline == []


def test_a_loop_is_annotated_with_its_model(heard):
    model = small()
    model.encode = model.forward
    optimizer = sgd(model)
    loader = DataLoader(torch.randn(4, 4), batch_size=2)
    with annotate_model(model, optimizer=optimizer, dataloader=loader, methods=["0.forward"]) as annotation:
        for batch in annotation.dataloader:
            model[0].forward(model(batch)).sum().backward()
            optimizer.step()
    assert [line.strip() for line in heard.outline].count("optimizer") == 2
    assert [line.strip() for line in heard.outline].count("data") >= 2
    assert heard.layers.count("0") == 4
    for wrong in ({"methods": "nothing.forward"}, {"methods": "0.nothing"}, {"optimizer": object()}):
        with pytest.raises(UsageError):
            annotate_model(model, **wrong)
    annotate_model(model).remove()  # nothing of the failed ones is left
