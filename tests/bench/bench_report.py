"""How long the page, the plots and the export take on a large capture, as ratios to `nvprof-kit layers` of one run.

python tests/bench/bench_report.py [--copies 500] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench_layers import DATA, amplify, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = folder / "large.sqlite"
        rows = amplify(DATA / "hooks-train-2023.4.sqlite.xz", large, options.copies)
        small = DATA / "llama-2023.4.sqlite.xz"
        print(f"{sum(count for table, count in rows.items() if 'CUPTI' in table):,} CUDA calls and operations")
        ours = [sys.executable, "-m", "nvprof_kit"]
        commands = {
            "layers": [*ours, "layers", "--format", "csv", str(large)],
            "report": [*ours, "report", str(large), "-o", str(folder / "page.html")],
            "plot --view timeline": [*ours, "plot", "--view", "timeline", str(large), "-o", str(folder / "plot.png")],
            "report of 64": [*ours, "report", *[str(small)] * 64, "-o", str(folder / "many.html")],
            "export": [*ours, "export", str(large), "-o", str(folder / "trace.json.gz")],
        }
        seen = measure(commands, options.rounds)
        sizes = {name: (folder / name).stat().st_size / 1e6 for name in ("page.html", "many.html")}
    for verb, (seconds, memory) in seen.items():
        print(f"{verb:22}{seconds / seen['layers'][0]:6.2f} times layers, {memory:5.0f} MB")
    print(", ".join(f"{name} {size:.2f} MB" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
