"""What it costs to keep one step in a thousand for telemetry, on a CPU; `tests/gpu/programs/telemetry.py` on a GPU.

    python tests/bench/bench_telemetry.py [--layers 4] [--width 256] [--batch 4] [--length 128] ...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu" / "programs"))
from telemetry import main

if __name__ == "__main__":
    main("cpu")
