"""Reference implementation of the breakdown: plain SQL, and one entry per nanosecond boundary.

It shares no code with the package. Between two neighbouring boundaries of operations nothing changes, so each such
piece is asked which operations hold it.
"""

import sqlite3
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


def operations(path: Path) -> list[tuple[int, int, str]]:
    """Start, end and sort (compute, comm, copy) of every operation, by start."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    found = []
    for table in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"):
        name = f"CUPTI_ACTIVITY_KIND_{table}"
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone():
            continue
        label = "(SELECT value FROM StringIds WHERE id = demangledName)" if table == "KERNEL" else "''"
        for start, end, text in db.execute(f'SELECT start, "end", {label} FROM {name}'):
            found.append((start, end, "copy" if table.startswith("MEM") else "comm" if "nccl" in text else "compute"))
    return sorted(found)


def states(ops: list[tuple[int, int, str]], low: int, high: int) -> dict[str, int]:
    """Time of each state between two moments, for operations of one device."""
    inside = [(max(start, low), min(end, high), sort) for start, end, sort in ops if start < high and end > low]
    edges = sorted({low, high, *(edge for start, end, _ in inside for edge in (start, end))})
    spent = {"compute": 0, "comm": 0, "copy": 0, "idle": 0}
    waiting, running = 0, []
    for begin, finish in pairwise(edges):
        while waiting < len(inside) and inside[waiting][0] <= begin:
            running.append(inside[waiting])
            waiting += 1
        running = [op for op in running if op[1] > begin]
        sorts = {sort for _, _, sort in running}
        spent[next((one for one in ("compute", "comm", "copy") if one in sorts), "idle")] += finish - begin
    return spent


class Open(NamedTuple):
    """Something that is open on a thread from start to end."""

    name: str
    start: int
    end: int


def innermost(stack: list[Open], moment: int) -> str:
    """The open one that began last, of those the shortest, of equal ones the last in the stack; '' for none."""
    here = [one for one in stack if one.start <= moment < one.end]
    return max(reversed(here), key=lambda one: (one.start, -one.end)).name if here else ""


def spent(stack: list[Open], begin: int, end: int) -> Counter[str]:
    """Nanoseconds of a gap by what is innermost."""
    return Counter(innermost(stack, moment) for moment in range(begin, end))
