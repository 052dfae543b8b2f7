"""Builds snapshots of the CUDA caching allocator as `torch.cuda.memory._snapshot()` returns them, event by event.

What is shared there is shared here (frames, keys, actions), and what is not is not (the stack of each event), so that a
pickle has the size and the loading time of a real one.
"""

import pickle
from pathlib import Path
from typing import Any

BASE = 0x7F0000000000
SEGMENT = 1 << 21


class SnapshotFile:
    """Builds a snapshot of one device.

    ```python
    file = SnapshotFile()
    block = file.alloc(4096, label="nvprof_kit:forward:layers.0;step=0", stack=["model.py:10:forward"])
    file.free(block)
    ```
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, list[Any]]] = {}
        self._frames: dict[str, dict[str, Any]] = {}
        self._next = BASE
        self._reuse: dict[int, list[int]] = {}
        self._time = 1_700_000_000_000_000

    def frames(self, stack: list[str]) -> list[dict[str, Any]]:
        made = []
        for text in stack:
            if text not in self._frames:
                filename, line, name = text.rsplit(":", 2)
                self._frames[text] = {"filename": filename, "line": int(line), "name": name}
            made.append(self._frames[text])
        return made

    def event(self, action: str, addr: int, size: int, label: str, stack: list[str]) -> None:
        self._time += 10
        what = {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": self._time}
        more = {"compile_context": "N/A", "user_metadata": "".join(label), "pool_id": (0, 0)}
        self.events.append({**what, **more, "frames": self.frames(stack)})

    def alloc(self, size: int, label: str = "", stack: list[str] | None = None, event: bool = True) -> int:
        """Allocate; ``event=False`` for what was there before the history began."""
        free = self._reuse.get(size)
        addr = free.pop() if free else self._next
        if addr == self._next:
            self._next += size
        stack = stack or []
        if event:
            self.event("alloc", addr, size, label, stack)
        self.live[addr] = (size, self.frames(stack))
        return addr

    def free(self, addr: int, label: str = "", completed: bool = True) -> None:
        size, _ = self.live.pop(addr)
        self._reuse.setdefault(size, []).append(addr)
        self.event("free_requested", addr, size, label, [])
        if completed:
            self.event("free_completed", addr, size, label, [])

    def snapshot(self) -> dict[str, Any]:
        blocks = []
        sizes = {addr: size for size, addrs in self._reuse.items() for addr in addrs}
        for addr in sorted([*self.live, *sizes]):
            held = addr in self.live
            size, frames = self.live.get(addr, (sizes.get(addr, 0), []))
            state = "active_allocated" if held else "inactive"
            blocks.append({"address": addr, "size": size, "requested_size": size, "state": state, "frames": frames})
        held_bytes = sum(size for size, _ in self.live.values())
        sizes_held = dict.fromkeys(("allocated_size", "active_size", "requested_size"), held_bytes)
        where = {"device": self.device, "address": BASE, "total_size": self._next - BASE, "stream": 0}
        kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
        segment = {**where, **sizes_held, **kind, "frames": [], "blocks": blocks}
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": [segment] if blocks else [],
            "device_traces": [*traces, self.events],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
            "external_annotations": [],
        }

    def write(self, path: Path) -> Path:
        with path.open("wb") as file:
            pickle.dump(self.snapshot(), file)
        return path


def training(events: int, layers: int = 32) -> SnapshotFile:
    """A training run with this many events: activations freed in backward, temporaries, and one leak per step."""
    file = SnapshotFile()
    trunk = [f"/site-packages/torch/nn/modules/module.py:{1700 + n}:_call_impl" for n in range(30)]
    step = 0
    for _ in range(layers):
        file.alloc(64 << 20, event=False)
    while len(file.events) < events:
        kept: list[list[int]] = []
        for layer in range(layers):
            label = f"nvprof_kit:forward:model.layers.{layer};step={step}"
            kept.append([])
            for number in range(12):
                stack = [f"model.py:{100 + number}:forward", *trunk, "train.py:10:<module>"]
                kept[-1].append(file.alloc((number % 4 + 1) << 20, label, stack))
                file.free(file.alloc(512 * (1 + number % 3), label, stack), label)
        for layer in reversed(range(layers)):
            label = f"nvprof_kit:backward:model.layers.{layer};step={step}"
            stack = ["autograd.py:1:backward", *trunk, "train.py:11:<module>"]
            for addr in kept[layer]:
                file.free(file.alloc(1 << 20, label, stack), label)
                file.free(addr, label)
        file.alloc(4096, f"nvprof_kit:phase:optimizer;step={step}", ["log.py:3:remember", *trunk])
        step += 1
    return file


def amplified(snapshot: dict[str, Any], events: int) -> dict[str, Any]:
    """A real snapshot with its history repeated up to this many events.

    What a history leaves allocated is left out of all but the last; what is shared between events stays shared.
    """
    history = snapshot["device_traces"][0]
    held: dict[int, int] = {}
    for number, event in enumerate(history):
        if event["action"] == "alloc":
            held[event["addr"]] = number
        elif event["action"].startswith("free"):
            held.pop(event["addr"], None)
    left = set(held.values())
    once = [event for number, event in enumerate(history) if number not in left and "segment" not in event["action"]]
    length = history[-1]["time_us"] - history[0]["time_us"] + 1
    times = max((events - len(history)) // len(once), 0)
    made = []
    for number in range(times + 1):
        for event in once if number < times else history:
            copied = {**event, "time_us": event["time_us"] + number * length}
            if "frames" in copied:
                copied["frames"] = list(copied["frames"])
            copied["user_metadata"] = "".join(copied["user_metadata"])
            made.append(copied)
    return {**snapshot, "device_traces": [made]}
