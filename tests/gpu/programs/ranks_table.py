"""What captures of two ranks show at first sight: how long each waited for the other in NCCL's kernels, step by step.

python ranks_table.py FOLDER       KIND-FAULT.rankR-VERSION.sqlite, as take_ranks.sh leaves them

The kernels of both are paired by their order; their ends, which fall together, tell how far the clocks are apart. A
rank waited from its own kernel's start to the other's, if that began later. ``first`` is the first pair's alone,
positive where rank 0 waited, and left out of the sums. A pipeline's sends and receives overlap, so its sums count some
time twice.
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
from pathlib import Path

KERNELS = (
    "SELECT k.start, k.end FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName "
    "WHERE s.value LIKE 'ncclDevKernel%' ORDER BY k.start"
)
MARKS = (
    "SELECT DISTINCT coalesce(e.text, s.value) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId "
    "WHERE e.eventType = 34 AND coalesce(e.text, s.value) LIKE 'rank %'"
)


def read(path: Path) -> tuple[list[tuple[int, int]], list[str]]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        kernels = db.execute(KERNELS).fetchall() if "CUPTI_ACTIVITY_KIND_KERNEL" in tables else []
        return kernels, [text for (text,) in db.execute(MARKS)] if "NVTX_EVENTS" in tables else []


def main() -> None:
    print(f"{'capture':18} {'pairs':>5}  {'first':>7}  {'rank 0 waits':>12}  {'rank 1 waits':>12}  ms; marks")
    for path in sorted(Path(sys.argv[1]).glob("*.rank0-*.sqlite")):
        (first, said), (second, also_said) = (read(Path(str(path).replace(".rank0-", f".rank{n}-"))) for n in range(2))
        marks = " / ".join(said + also_said)
        name = path.name.split(".")[0]
        if not first or len(first) != len(second):
            print(f"{name:18} {len(first)} and {len(second)} kernels of NCCL cannot be paired; {marks}")
            continue
        offset = statistics.median(one[1] - other[1] for one, other in zip(first, second, strict=True))
        later = [(other[0] + offset - one[0]) / 1e6 for one, other in zip(first, second, strict=True)]
        waits = [sum(max(0.0, sign * late) for late in later[1:]) for sign in (1, -1)]
        print(f"{name:18} {len(first):5}  {later[0]:7.1f}  {waits[0]:12.1f}  {waits[1]:12.1f}  {marks}")


if __name__ == "__main__":
    main()
