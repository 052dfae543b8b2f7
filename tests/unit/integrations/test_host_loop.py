"""`HostLoop`: the steps, phases, micro-batches and evaluations of any loop, from PyTorch's own points."""

import gzip
import json
import warnings
from collections.abc import Iterator

import pytest
import torch
from support.model_zoo import small
from support.ranges.sink import Outline
from torch import nn
from torch.utils.data import DataLoader, Sampler, dataloader

import nvprof_kit._instrument.session as session
from nvprof_kit.errors import UsageError
from nvprof_kit.integrations._host import HostLoop


def begun(model: nn.Module, **options: object) -> HostLoop:
    loop = HostLoop(annotation={}, **options)
    loop.begin(model)
    return loop


def train(model: nn.Module, loop: HostLoop, steps: int = 1, told: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(DataLoader(torch.randn(steps * 2, 4), batch_size=2))
    for _ in range(steps):
        model(next(loader)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if told:
            loop.step_end()


STEP = ["  data", "  forward", "  backward", "  optimizer"]


def test_a_sampler_without_a_length_is_left_alone(heard):
    class Unbounded(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            raise TypeError("a stream has no length")

    model = small()
    loop = begun(model)
    for batch in DataLoader(torch.randn(4, 4), batch_size=4, sampler=Unbounded()):
        model(batch).sum().backward()
        loop.step_end()
    loop.end()
    assert heard.outline[:4] == ["step 0", *STEP[:3]]


def test_an_evaluation_is_of_no_step(heard):
    model = small()
    loop = begun(model, own_steps=True)
    train(model, loop, told=False)
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(torch.randn(4, 4), batch_size=2):
            model(batch)
    model.train()
    train(model, loop, told=False)
    loop.end()
    assert heard.outline == ["step 0", *STEP, "eval", "step 1", *STEP]


def adversaries(loop: HostLoop, rounds: int, optimizers: int = 2) -> None:
    """The rounds of a generator and a discriminator, both of one class, without a loader; the second is added."""
    made, judge = small(), small()
    loop.begin(made)
    loop.annotate_too(judge)
    of_made, of_judge = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (made, judge))
    known = [of_made, of_judge, torch.optim.SGD(made.parameters(), lr=1.0)]  # the last one never steps
    for optimizer in known[:optimizers]:
        loop.know_optimizer(optimizer)
    for _ in range(rounds):
        fake = made(torch.randn(2, 4))
        judge(fake.detach()).sum().backward()
        of_judge.step()
        judge(fake).sum().backward()
        of_made.step()
    loop.end()


@pytest.mark.parametrize("optimizers", [2, 3])
def test_a_step_ends_when_all_optimizers_have_stepped(optimizers, heard):
    adversaries(HostLoop(annotation={}, own_steps=True), 2, optimizers)
    body = ["  forward", "  backward", "  optimizer"] * 2
    assert heard.outline == ["step 0", *body, "step 1", *body]
    assert {"Sequential", "Sequential2", "Sequential2.0", "0"} <= set(heard.under("forward"))


def test_a_frozen_teacher_takes_part_in_the_step(heard):
    teacher, student = small().eval(), small()
    loop = HostLoop(annotation={}, own_steps=True)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    loop.know_optimizer(optimizer)
    loop.begin(teacher)
    for _ in range(2):
        with torch.no_grad():
            wanted = teacher(torch.ones(2, 4))
        loop.annotate_too(student)
        (student(torch.ones(2, 4)) - wanted).sum().backward()
        optimizer.step()
    student.eval()
    with torch.no_grad():
        teacher(torch.ones(2, 4)), student(torch.ones(2, 4))
    loop.end()
    step = ["  forward", "  backward", "  optimizer"]
    assert heard.outline == ["step 0", *step, "step 1", *step, "eval"]
    assert heard.under("eval")[0] == "Sequential" and "Sequential2" in heard.under("eval")


def test_a_model_inside_another_begins_no_step(heard):
    inner = nn.Linear(4, 4)
    whole = nn.Sequential(inner, nn.ReLU()).eval()
    loop = HostLoop(own_steps=True)
    loop.trains = False
    loop.begin(inner)
    with torch.no_grad():
        inner(torch.randn(2, 4))
        loop.add(whole)
        whole(torch.randn(2, 4))
        with pytest.raises(RuntimeError):
            whole(torch.randn(2, 5))
        inner(torch.randn(2, 4))
    loop.end()
    assert heard.outline == [line for number in range(4) for line in (f"step {number}", "  forward")]


def test_inference_has_a_step_for_each_call(heard):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).eval()
    loop = begun(model, own_steps=True)
    loop.trains = False
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
        model(torch.tensor([[1]]))
    loop.end()
    assert heard.outline == ["step 0", "  prefill", "step 1", "  decode"]


def test_pytorch_is_changed_while_somebody_listens_to_a_loop_that_runs():
    def hooked() -> tuple[object, object]:
        return dataloader._BaseDataLoaderIter.__next__, torch.autograd.backward

    model, before = small(), hooked()
    loop = begun(model)
    assert hooked() == before
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    session.activate(outline := Outline())
    assert hooked()[0] is not before[0] and hooked()[1] is not before[1]
    session.deactivate()
    assert hooked() == before
    session.activate(outline)
    loop.end()
    assert hooked() == before
    train(model, loop)
    session.deactivate()
    assert outline.outline == []


def test_what_fails_inside_is_one_warning(heard, monkeypatch):
    model = small()
    loop = begun(model)
    monkeypatch.setattr(HostLoop, "_ensure_step", lambda _self: 1 / 0)
    with pytest.warns(UserWarning, match="stops, the run continues.*ZeroDivisionError") as caught:
        train(model, loop, steps=3)
    assert len([one for one in caught if "stops, the run" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, loop)


def test_a_wrong_schedule_is_said_where_it_is_given():
    with pytest.raises(UsageError, match="none of early"):
        HostLoop("sometimes")


def test_a_wrong_schedule_of_the_environment_leaves_the_ranges(heard, monkeypatch):
    monkeypatch.setenv("NVPROF_KIT_SCHEDULE", "sometimes")
    model = small()
    with pytest.warns(UserWarning, match="none of early.*nothing is recorded by it"):
        loop = begun(model)
    train(model, loop)
    loop.end()
    assert "step 0" in heard.outline


def test_a_schedule_records_its_steps(tmp_path):
    model = small()
    loop = begun(model, schedule="1:3", path=tmp_path / "run.json.gz")
    train(model, loop, steps=4)
    loop.end()
    with gzip.open(tmp_path / "run.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    steps = [name for name in names if name.startswith("nvprof_kit:step:")]
    assert steps == ["nvprof_kit:step:step 1", "nvprof_kit:step:step 2"]


def test_hooks_that_cannot_be_installed_are_one_warning(heard, monkeypatch):
    monkeypatch.delattr(dataloader._BaseDataLoaderIter, "__next__")
    model = small()
    with pytest.warns(UserWarning, match="stops, the run continues"):
        loop = begun(model)
    model(torch.randn(2, 4)).sum().backward()
    loop.end()
    assert heard.outline == []
