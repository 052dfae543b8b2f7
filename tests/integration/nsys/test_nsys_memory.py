"""Real Nsight Systems records the memory that layers' ranges carry, and the ranges stay what they are."""

import sqlite3
from pathlib import Path

import pytest
from support.captures.nsys_file import KERNEL_TABLE
from support.nsys import profile, read

import nvprof_kit

pytestmark = pytest.mark.nsys

PROGRAM = """
import torch
from torch import nn
from nvprof_kit import annotate_model, phase, step
from nvprof_kit._instrument.session import Level

held, most = 1000, 1000

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden):
        global held, most
        most = max(most, held + 512)  # what it needs for a while
        held += 64                    # what it keeps
        return self.linear(hidden)

net = nn.Sequential(Block(), Block())
annotate_model(net, depth=1, root="net", memory=lambda: Level(held, most))
annotate_model(nn.Linear(4, 4), memory=lambda: Level(held, most))  # no reason for each mark to come twice
with step(3), phase("forward"):
    net(torch.ones(1, 4)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.every_nsys
def test_layers_carry_the_memory(nsys, tmp_path):
    path = profile(nsys, tmp_path, PROGRAM)
    recorded = read(path)
    told = [(event.text, event.payload) for event in recorded if event.kind in (34, 59)]
    assert told[:2] == [("step 3", 3), ("forward", None)], "neither is a layer's"
    assert told[2:12] == [
        ("net", -1),
        ("allocated at begin", 1000),
        ("0", 0),
        ("allocated at begin", 1000),
        ("peak inside", 1512),  # 1000 + 512, where it was 1000 before
        ("allocated at end", 1064),
        ("1", 1),
        ("allocated at begin", 1064),
        ("peak inside", 1576),
        ("allocated at end", 1128),
    ]
    assert told[12:14] == [("peak inside", 1576), ("allocated at end", 1128)], "of net"
    marks = [event for event in recorded if event.kind == 34]
    assert {event.category for event in marks} == {"memory"}
    assert all(event.registered for event in marks)
    assert len(marks) == 9 + 2 * 3, "three calls, each with a peak; three backward stretches without"
    rows = nvprof_kit.open(with_a_kernel(path)).layers(columns="memory").rows
    names = ["layer", "phase", "memory_begin_bytes", "memory_end_bytes", "memory_retained_bytes", "memory_peak_bytes"]
    assert rows[rows["layer"] != "(none)"][names].to_numpy().tolist() == [
        ["net", "forward", 1000, 1128, 128, 1576],
        ["net", "backward", 1128, 1128, 0, 1128],
        ["0", "forward", 1000, 1064, 64, 1512],
        ["0", "backward", 1128, 1128, 0, 1128],
        ["1", "forward", 1064, 1128, 64, 1576],
        ["1", "backward", 1128, 1128, 0, 1128],
    ]


def with_a_kernel(path: Path) -> Path:
    """The export with a kernel that nobody launched, as this machine has no GPU."""
    with sqlite3.connect(path) as db:
        db.execute(KERNEL_TABLE)
        (pid,) = db.execute("SELECT globalTid & ~16777215 FROM NVTX_EVENTS LIMIT 1").fetchone()
        columns = "start, [end], deviceId, correlationId, globalPid, demangledName"
        db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES (1, 2, 0, 1, ?, 1)", (pid,))
    db.close()
    return path
