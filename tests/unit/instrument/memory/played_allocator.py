"""PyTorch's functions of the allocator's history, as far as they are used, played."""

from typing import Any


class Allocator:
    """Notes what is asked of it; a program's allocations are told by `alloc`."""

    def __init__(self) -> None:
        self.labels = [""]
        self.recording: list[object] = []
        self.events: list[dict[str, Any]] = []
        self.observer: Any = None

    def _record_memory_history(self, enabled: str | None, clear_history: bool = False, **_options: object) -> None:
        self.recording.append(enabled)
        if clear_history:
            self.events = []

    def _snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [[], self.events]}

    def _set_memory_metadata(self, label: str) -> None:
        self.labels.append(label)

    def alloc(self, size: int) -> None:
        self.events.append({"action": "alloc", "size": size, "user_metadata": self.labels[-1]})
        self.events.append({"action": "free_requested", "size": 10 * size, "user_metadata": self.labels[-1]})
