"""Leave in a raw page of ncu only what the tables of layers are made of, so that a page of every launch stays small.

python shorten_ncu.py FULL.csv > SHORT.csv
"""

from __future__ import annotations

import csv
import sys

from nvprof_kit._analysis.ncu.counters import AMOUNTS, DURATION, PERCENTAGES

BASES = {name.split(".")[0] for names in (DURATION, *PERCENTAGES.values()) for name in names}
BASES |= {base for ways in AMOUNTS.values() for way in ways for base, _factor in way}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8", newline="") as page:
        rows = [row for row in csv.reader(page) if len(row) > 2]
    about = rows[0].index("CC") + 1
    kept = [column for column, title in enumerate(rows[0]) if column < about or title.split(".")[0] in BASES]
    kept += [column for column, title in enumerate(rows[0]) if title.startswith("launch__")]
    writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([row[column] for column in dict.fromkeys(kept)] for row in rows)


if __name__ == "__main__":
    main()
