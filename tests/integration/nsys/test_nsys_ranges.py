"""Real Nsight Systems records our ranges: domain, categories, registered strings, payloads, nesting, threads."""

import pytest
from support.nsys import Recorded, profile, read

pytestmark = pytest.mark.nsys

PROGRAM = """
import torch
from torch import nn
from nvprof_kit import annotate_model, annotate_optimizer, layer_range, mark, phase, step

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
        return loss(hidden)

@layer_range("loss")
def loss(hidden):
    return hidden.square().sum()

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
annotate_model(net, depth=1)
annotate_optimizer(optimizer)
for number in (7, 8):
    with step(number):
        with phase("forward"):
            out = net(torch.arange(4).reshape(1, 4))
        with phase("backward"):
            out.backward()
        optimizer.step()
        mark("done")
layer_range.end(layer_range.start("prefetch", category="data"))
"""

NESTING = """
step 7
  forward
    Net
      embed
      layers.0
      layers.1
      loss
  backward
    Net backward
      loss backward
      layers.1 backward
        layers.1 recompute
      layers.0 backward
        layers.0 recompute
      embed backward
  optimizer
"""


def nesting(ranges: list[Recorded]) -> str:
    """The texts, indented by how they lie in each other."""
    lines, stack = [], []
    for range_ in ranges:
        while stack and stack[-1].end <= range_.start:
            stack.pop()
        assert not stack or range_.end <= stack[-1].end, f"{range_} crosses {stack[-1]}"
        lines.append("  " * len(stack) + range_.text)
        stack.append(range_)
    return "\n".join(lines)


@pytest.mark.fast
@pytest.mark.every_nsys
def test_ranges_are_recorded(nsys, tmp_path):
    recorded = read(profile(nsys, tmp_path, PROGRAM))
    ranges = [event for event in recorded if event.kind == 59]
    assert nesting(ranges) == NESTING.strip() + "\n" + NESTING.strip().replace("step 7", "step 8")
    assert all(event.registered for event in recorded)
    assert len({range_.thread for range_ in ranges}) == 1
    assert {(event.text, event.category, event.payload) for event in recorded} == {
        ("step 7", "step", 7),
        ("step 8", "step", 8),
        ("forward", "phase", None),
        ("backward", "phase", None),
        ("optimizer", "phase", None),
        ("Net", "forward", -1),
        ("Net backward", "backward", -1),
        ("embed", "forward", -1),
        ("embed backward", "backward", -1),
        ("loss", "forward", -1),
        ("loss backward", "backward", -1),
        *(
            (f"layers.{index}{'' if category == 'forward' else f' {category}'}", category, index)
            for index in (0, 1)
            for category in ("forward", "backward", "recompute")
        ),
        ("done", "user", None),
        ("prefetch", "data", -1),
    }
    assert [event.text for event in recorded if event.kind == 60] == ["prefetch"]
    assert [event.text for event in recorded if event.kind == 34] == ["done", "done"]
