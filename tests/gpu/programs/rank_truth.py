"""What `nvprof-kit ranks` says of captures of ranks.py, beside what the programs wrote down when it happened.

    python3 rank_truth.py CAPTURES TRUTH      KIND-FAULT.rankR-VERSION.sqlite, and KIND/truth.rankR.jsonl

The clocks are checked without the package, too: each step's mark ``clock NANOSECONDS`` tells the host's clock, which
the ranks of a host share, and the least delay of a mark is the nearest.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import defaultdict
from pathlib import Path

from rank_faults import PLACES

from nvprof_kit import open_job

MARKS = (
    "SELECT e.start, coalesce(e.text, s.value) FROM NVTX_EVENTS AS e LEFT JOIN StringIds AS s ON s.id = e.textId "
    "WHERE e.eventType = 34 AND coalesce(e.text, s.value) LIKE 'clock %'"
)


def host_clock(path: Path) -> int:
    """What is added to a capture's times to have its host's."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return max(int(text.split()[1]) - start for start, text in db.execute(MARKS))


def planted(folder: Path, fault: str) -> dict[int, list[float]]:
    """How long each time took, in ms, by rank: on the device where that was timed, else on the host."""
    took: dict[int, list[float]] = defaultdict(list)
    for log in sorted(folder.glob("truth.rank*.jsonl")):
        for row in map(json.loads, log.read_text().splitlines()):
            if row["fault"] == fault:
                host = (row["end_ns"] - row["begin_ns"]) / 1e6
                took[row["rank"]].append(max(host, row.get("device_ms", 0.0)))
    return took


def main() -> None:
    captures, truth = map(Path, sys.argv[1:3])
    for first in sorted(captures.glob("*.rank0-*.sqlite")):
        kind, fault = first.name.split(".")[0].split("-", 1)
        ranks = sorted(captures.glob(first.name.replace(".rank0-", ".rank*-")))
        job = open_job(ranks, workers=1)
        rank, layer, phase, what = PLACES.get(fault, (-1, "?", "?", "?"))
        print(f"{kind}-{fault}: planted on rank {rank} in {layer or 'no layer'} {phase}: {what}")
        for one, times in planted(truth / kind, fault).items():
            print(f"  rank {one}: {len(times)} times, {min(times):.1f} to {max(times):.1f} ms")
        print(f"  said: {job.verdict.sentence}")
        base = host_clock(ranks[0])
        for row, path in list(zip(job.clocks().to_frame().to_dict("records"), ranks, strict=True))[1:]:
            apart = (host_clock(path) - base - int(row["offset_ns"])) / 1e3
            residual = row["residual_ns"] / 1e3
            print(f"  clock of rank {row['rank']}: {apart:+.1f} us from the marks, residual {residual:.1f} us")


if __name__ == "__main__":
    main()
