"""Memory events, added to a file that `NsysFile` writes."""

import sqlite3
from pathlib import Path

from support.captures.nsys_file import MARK, TID, NsysFile, thread

DEVICE, PINNED, STATIC = 2, 1, 5


def carry(file: NsysFile, begin: tuple[int, int], end: tuple[int, int], *, peak: int = 0, tid: int = TID) -> None:
    """The marks of one range of a layer: (when, bytes) at its begin and at its end, and its peak, if that is known."""
    told = [("allocated at begin", *begin), ("allocated at end", *end)]
    if peak:
        told.append(("peak inside", end[0] - 1, peak))
    for text, when, count in told:
        file.range_(text, when, None, category="memory", payload=count, style=MARK, tid=tid)


class Allocations:
    """CUDA's own allocations."""

    def __init__(self) -> None:
        self.rows: list[tuple[object, ...]] = []

    def add(self, when: int, count: int, correlation: int | None, *, kind: int = DEVICE) -> None:
        """Add an allocation in bytes, negative for a free, by the call with a correlation id."""
        self.rows.append((when, thread(0), 0, abs(count), kind, int(count < 0), correlation))

    def into(self, path: Path) -> Path:
        """Write the allocations to a file."""
        with sqlite3.connect(path) as db:
            db.execute(
                "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start INT, globalPid INT, deviceId INT, bytes INT, "
                "memKind INT, memoryOperationType INT, correlationId INT)"
            )
            marks = ", ".join("?" * 7)
            db.executemany(f"INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES ({marks})", self.rows)
        db.close()
        return path
