"""Real Nsight Systems records the stages of `global_timer` as phases, and the same program leaves its log."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nsys

PROGRAM = """
from nvprof_kit import global_timer, step
for number in range(2):
    with step(number):
        with global_timer.stage("forward"):
            global_timer.start("attention")
            global_timer.stop("attention")
        global_timer.start("backward")
        global_timer.stop("backward")
"""

RANGES = """
SELECT coalesce(e.text, s.value), c.text FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
LEFT JOIN NVTX_EVENTS c ON c.eventType = 33 AND c.domainId = e.domainId AND c.category = e.category
WHERE e.eventType = 59 AND coalesce(e.text, s.value) <> 'gc' ORDER BY e.start
"""


def test_stages_are_phases_in_nsys(nsys: str, tmp_path: Path) -> None:
    report = tmp_path / "run"
    base = [nsys, "profile", "-t", "nvtx", "-s", "none", "--cpuctxsw=none", "--export=sqlite", "-o", str(report)]
    done = subprocess.run(
        [*base, sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with sqlite3.connect(report.with_suffix(".sqlite")) as database:
        ranges = database.execute(RANGES).fetchall()
    one = [("forward", "phase"), ("attention", "phase"), ("backward", "phase")]
    assert ranges == [("step 0", "step"), *one, ("step 1", "step"), *one]
    log = (tmp_path / "time_log" / "timer_rank0.log").read_text().splitlines()
    assert [line.split(",")[0] for line in log] == ["[RANK 0] attention", "[RANK 0] forward", "[RANK 0] backward"] * 2
