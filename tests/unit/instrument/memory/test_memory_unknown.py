"""What the allocator holds beside known tensors, and the largest allocation of a layer, by a stand-in allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nvprof_kit._instrument.memory.allocator import (
    Block,
    Boundaries,
    History,
    cast_weights,
    unknown_rows,
    workspace_bytes,
)
from nvprof_kit._instrument.memory.tensors import Counts, Held
from nvprof_kit._instrument.ranges.ranges import Range
from nvprof_kit.names import Category

CPU = torch.device("cpu")
MIB = 1 << 20


def test_unknown_memory_is_told_by_its_size_and_adds_up() -> None:
    blocks = [
        Block(0x1000, 512, 400),  # a known tensor
        Block(0x2000, 32 * MIB, 32 * MIB),
        Block(0x4000000, 32 * MIB, 32 * MIB),
        Block(0x8000000, 1024, 1024),
        Block(0x8000400, 1024, 1024),
        Block(0x8000800, 1024, 1024),
        Block(0x8001000, 512, 8),
    ]
    casts = [("a.weight", 1024), ("b.weight", 1024), ("c.weight", 2048)]
    rows = list(
        unknown_rows(CPU, blocks, {0x1000}, workspace=32 * MIB, casts=casts, unexplained=64 * MIB + 3 * 1024 + 8 - 100)
    )
    assert rows == [
        Held("workspace", "cublas", 64 * MIB, "cpu"),
        Held("autocast", "a.weight", 1024, "cpu"),
        Held("autocast", "b.weight", 1024, "cpu"),
        Held("unexplained", "1 of 1024 bytes", 1024, "cpu"),
        Held("unexplained", "1 of 8 bytes", 8, "cpu"),
        Held("unexplained", "", -100, "cpu"),  # 100 bytes of known tensors are in no block: the rest says so
    ]


class Memory:
    """PyTorch's functions of the allocator's history, as far as they are used."""

    def __init__(self) -> None:
        self.label = ""
        self.calls: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def _set_memory_metadata(self, label: str) -> None:
        self.label = label

    def _record_memory_history(self, **options: Any) -> None:
        self.calls.append(options)
        if options.get("clear_history"):
            self.events = []

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": [[], self.events]}

    def alloc(self, size: int) -> None:
        self.events.append({"action": "alloc", "size": size, "user_metadata": self.label})
        self.events.append({"action": "free_requested", "size": 10 * size, "user_metadata": self.label})


def test_the_largest_allocation_of_each_call() -> None:
    memory = Memory()
    history = History(1, memory)
    boundaries = Boundaries(lambda: Counts(100, 100, 4096, 100), history)
    history.start()
    model, part = Range("model", Category.FORWARD), Range("model.a", Category.FORWARD)
    memory.alloc(999)  # in no layer
    boundaries.entered(model)
    memory.alloc(10)
    boundaries.entered(part)
    memory.alloc(70)
    memory.alloc(30)
    boundaries.left(part)
    boundaries.settle()  # a time point between: the model's call has not ended
    memory.alloc(20)
    boundaries.left(model)
    boundaries.entered(part)
    boundaries.left(part)
    memory.alloc(999)
    boundaries.counts()
    assert [(b.layer, b.largest) for b in boundaries.seen] == [("model.a", 70), ("model", 70), ("model.a", 0)]
    history.stop()
    assert memory.label == ""
    assert memory.calls[-1] == {"enabled": None}
    boundaries.entered(part)
    boundaries.left(part)
    boundaries.settle()
    assert boundaries.seen[-1].largest is None


def test_the_size_of_a_workspace() -> None:
    assert workspace_bytes((9, 0), {}) == 32 * MIB
    assert workspace_bytes((8, 0), {}) == 8 * MIB + 128 * 1024
    assert workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}) == 8 * MIB + 128 * 1024
    assert workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == 0
    assert workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": "nonsense"}) == 32 * MIB


def test_what_autocast_may_have_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    assert not list(cast_weights(model, CPU))
    with torch.autocast("cpu", torch.bfloat16):
        assert list(cast_weights(model, CPU)) == [("0.weight", 4 * 8 * 2)]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert not list(cast_weights(model, CPU))
