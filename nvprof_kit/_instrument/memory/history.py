"""The largest allocation of each layer call, from the allocator's event history."""

from __future__ import annotations

from typing import Any

import torch

_PREFIX = "nvprof_kit:call:"
_EVENTS = 200_000
"""Maximum number of events kept between two readings."""


class History:
    """The allocator history of one CUDA device, recorded without stacks; events are labeled with the number of a call.

    PyTorch records one history at a time. If another recording is active, or before PyTorch 2.9, which added labels,
    this class records nothing.

    Args:
        device: Device ordinal.
        memory: The module ``torch.cuda.memory``.
    """

    def __init__(self, device: int, memory: Any = torch.cuda.memory) -> None:
        self._device = device
        self._memory = memory
        self._recording = False

    def start(self) -> None:
        """Start recording."""
        if hasattr(self._memory, "_set_memory_metadata") and not _recorded_by_others():
            self._record()
            self._recording = True

    def stop(self) -> None:
        """Stop recording."""
        recording, self._recording = self._recording, False
        if recording:
            self.label(None)
            if not _snapshot_runs():
                self._memory._record_memory_history(enabled=None)

    def label(self, number: int | None) -> None:
        """Label later allocations with the number of a call."""
        if self._recording:
            self._memory._set_memory_metadata("" if number is None else f"{_PREFIX}{number}")

    def take(self) -> dict[int, int] | None:
        """Largest allocation of each call since the last reading, in bytes; None if not recording."""
        if not self._recording or _snapshot_runs():
            return None
        largest: dict[int, int] = {}
        for event in self._memory._snapshot()["device_traces"][self._device]:
            label = event.get("user_metadata") or ""
            if event["action"] == "alloc" and label.startswith(_PREFIX):
                number = int(label.removeprefix(_PREFIX))
                largest[number] = max(largest.get(number, 0), event["size"])
        self._record()
        return largest

    def _record(self) -> None:
        try:
            self._memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=_EVENTS, clear_history=True
            )
        except TypeError:  # older PyTorch cannot clear the history; reading events twice does not change a maximum
            self._memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=_EVENTS)


def _recorded_by_others() -> bool:
    recorded = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return _snapshot_runs() or bool(recorded and torch.cuda.is_available() and recorded())


def _snapshot_runs() -> bool:
    from nvprof_kit._instrument.memory import snapshot

    return snapshot._running is not None
