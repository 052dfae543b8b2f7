"""What captures of two ranks show at first sight: the time of each in NCCL's kernels, of which the late rank has less.

python ranks_table.py FOLDER       KIND-FAULT.rankR-VERSION.sqlite, as take_ranks.sh leaves them
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

KERNELS = (
    "SELECT count(*), coalesce(sum(k.end - k.start), 0) FROM CUPTI_ACTIVITY_KIND_KERNEL k "
    "JOIN StringIds s ON s.id = k.shortName WHERE s.value {} LIKE 'ncclDevKernel%'"
)
RANK = (
    "SELECT coalesce(e.text, s.value), count(*) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId "
    "WHERE e.eventType = 34 AND coalesce(e.text, s.value) LIKE 'rank %' GROUP BY 1"
)


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*.sqlite")):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            marks = db.execute(RANK).fetchall() if "NVTX_EVENTS" in tables else []
            kernels = "CUPTI_ACTIVITY_KIND_KERNEL" in tables
            nccl, others = (db.execute(KERNELS.format(no)).fetchone() if kernels else (0, 0) for no in ("", "NOT"))
        print(
            f"{path.stem:34} {path.stat().st_size / 1e6:5.1f} MB  nccl {nccl[0]:5} kernels {nccl[1] / 1e6:8.1f} ms  "
            f"others {others[0]:6} {others[1] / 1e6:8.1f} ms  {marks}"
        )


if __name__ == "__main__":
    main()
