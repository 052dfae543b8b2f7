"""A cell of a notebook that is run again annotates anew; a program that annotates twice is told so."""

from __future__ import annotations

import builtins

import pytest
import torch
from torch import nn

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model, annotate_optimizer


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_model_again(sink, notebook) -> None:
    net = model()
    first = annotate_model(net)
    second = annotate_model(net, depth=0)
    assert session.annotated[net] is second
    net(torch.zeros(1, 2))
    assert sink.lines == ["Sequential"]  # once, and with the later options: no range of "0" and "1"
    first.remove()  # the handle of the cell's first run takes nothing of the second back
    net(torch.zeros(1, 2))
    assert sink.lines == ["Sequential"] * 2


def test_a_model_made_again(sink, notebook) -> None:
    for _ in range(2):
        net = model()
        annotate_model(net)
    net(torch.zeros(1, 2))
    assert sink.lines == ["Sequential", "  0", "  1"]


def test_an_optimizer_again(sink, notebook) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        annotate_optimizer(optimizer)
    weight.sum().backward()
    optimizer.step()
    assert sink.lines == ["optimizer"]


def test_a_cell_of_ipython_run_twice(sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)  # which the shell sets, and leaves
    monkeypatch.setattr(builtins, "get_ipython", None, raising=False)
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    made = "import torch\nfrom nvprof_kit import annotate_model\nnet = torch.nn.Sequential(torch.nn.Linear(2, 2))"
    for cell in (made, "handle = annotate_model(net)", "handle = annotate_model(net)", "out = net(torch.zeros(1, 2))"):
        shell.run_cell(cell).raise_error()
    assert sink.lines == ["Sequential", "  0"]
