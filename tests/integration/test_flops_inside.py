"""Operations counted and time captured of one program: by the embedded recorder, and under a real nsys."""

import json
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from support.cli import execute, torchrun
from support.recipes import ranges

from nvprof_kit._cli import group

PROGRAM = """
import sys, torch
from contextlib import nullcontext
from torch import nn
import nvprof_kit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)

torch.manual_seed(0)
net = Net()
nvprof_kit.annotate_model(net)
folder = sys.argv[1]
recording = nvprof_kit.record(folder + "/run.json.gz") if "record" in sys.argv else nullcontext()
with recording:
    for number in range(3):
        counting = nvprof_kit.count_flops(folder + "/run.flops.json") if number == 1 else nullcontext()
        with counting, nvprof_kit.step(number):
            with nvprof_kit.phase("forward"):
                loss = net(torch.ones(3, 5, 16)).square().sum()
            with nvprof_kit.phase("backward"):
                loss.backward()
print(loss.item())
"""

# forward of a block: q, k, v and out of 16 x 16, two of 16 x 32, for 15 tokens; the scores of 5 sequences of 3 tokens
# and what they weigh, two products of 3 x 3 x 16 each; the head: 16 x 4
BLOCK = 2 * 15 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 5 * 3 * 3 * 16
HEAD = 2 * 15 * 16 * 4


def run(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> None:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    execute(*before, sys.executable, program, folder, *arguments, check=True)


@pytest.mark.slow
def test_a_recording_and_its_operations(tmp_path):
    run(tmp_path, "record")
    capture, out = tmp_path / "run.json.gz", tmp_path / "flops.csv"
    done = CliRunner().invoke(group, ["flops", str(capture), "--peak", "fp32=1e12", "-o", str(out)])
    assert done.exit_code == 0, done.output + str(done.exception)
    rows = pd.read_csv(out).set_index(["layer", "phase"])
    steps = rows.loc[("head", "forward"), "calls"]  # three, or two where the first was warm-up
    # the backward multiplies twice where the forward does once, but for the first block's input and the
    # scores, which this attention computes again: five products for two
    scores = 2 * 2 * 5 * 3 * 3 * 16
    assert rows.loc[("layers.0", "forward"), "flops"] == steps * BLOCK
    assert rows.loc[("Net", "forward"), "flops"] == steps * (2 * BLOCK + HEAD)
    assert rows.loc[("head", "backward"), "flops"] == steps * 2 * HEAD
    assert rows.loc[("layers.1", "backward"), "model_flops"] == steps * (2 * (BLOCK - scores) + 2.5 * scores)
    assert 0 < rows.loc[("layers.1", "recompute"), "flops"] <= steps * BLOCK
    # the model recomputes nothing itself, the layers inside it do
    assert set(rows.index[rows["calls"] == 0]) == {("Net", "recompute")}
    assert not (rows["note"] == "not in the count").any()
    # the same rows as in the capture: the count knows each range by the name that the recorder gave it
    layers = CliRunner().invoke(group, ["layers", str(capture), "--format", "csv", "-o", str(tmp_path / "layers.csv")])
    assert layers.exit_code == 0
    whole = pd.read_csv(tmp_path / "layers.csv")
    assert set(rows.index) == set(zip(whole["layer"], whole["phase"], strict=True)) - {("(none)", "other")}
    shown = CliRunner().invoke(group, ["flops", str(capture)])
    assert "on the CPU" in shown.stdout and "MFU" not in shown.stdout.split("\n\n")[0]


RANKS = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import nvprof_kit

torch.distributed.init_process_group("gloo")
for kind in ("ddp", "fsdp"):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)))
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    else:
        for part in (*net, net):
            fully_shard(part)
    nvprof_kit.annotate_model(net, depth=2)
    with nvprof_kit.count_flops(f"{sys.argv[1]}/{kind}.flops.json"), nvprof_kit.step(0):
        net(torch.ones(4, 16, requires_grad=True)).sum().backward()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_counts_its_own_work(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RANKS)
    torchrun(2, program, tmp_path, cwd=tmp_path)
    product = 2 * 4 * 16 * 32  # of one layer and 4 rows, whatever of its weights lies here
    for file in ("ddp.rank0", "ddp.rank1", "fsdp.rank0", "fsdp.rank1"):
        said = json.loads((tmp_path / f"{file}.flops.json").read_text())
        counted = {
            (said["ranges"][row["range"]]["layer"], said["ranges"][row["range"]]["phase"]): row["flops"]
            for row in said["operators"]
            if row["flops"]
        }
        layers = ("0.0", "0.2", "1.0", "1.2")
        assert counted == {(layer, "forward"): product for layer in layers} | {
            (layer, "backward"): 2 * product for layer in layers
        }
        assert said["unknown"] == [] and said["rank"] == int(file[-1])


@pytest.mark.slow
@pytest.mark.nsys
def test_under_nsys_the_ranges_stay_as_they_are(tmp_path, nsys):
    before = ("profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", "-o")
    run(tmp_path, before=(nsys, *before, str(tmp_path / "run")))
    texts = ranges(tmp_path / "run.sqlite")
    texts.remove("count_flops")
    steps = [number for number, text in enumerate(texts) if text.startswith("step ")]
    first, counted, last = (texts[at + 1 : end] for at, end in zip(steps, [*steps[1:], len(texts)], strict=True))
    assert first == counted == last and "layers.1 recompute" in counted
    said = json.loads((tmp_path / "run.flops.json").read_text())
    in_file = {
        row["layer"] if row["phase"] == "forward" or row["layer"] == "(none)" else f"{row['layer']} {row['phase']}"
        for row in said["ranges"]
        if row["layer"] != "(none)"
    }
    assert in_file == set(counted) - {"forward", "backward"}
