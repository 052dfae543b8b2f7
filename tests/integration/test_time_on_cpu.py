"""How busy the CPU is, as real Nsight Systems saw it, beside what the program itself measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nvprof_kit

pytestmark = pytest.mark.nsys

PROGRAM = """
import hashlib, threading, time
def work():
    block = bytes(1 << 20)
    for _ in range(250):
        hashlib.sha256(block).digest()  # gives the interpreter's lock away
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
time.sleep(0.3)
print(time.process_time_ns())
"""


def watched(nsys: str, report: Path) -> subprocess.CompletedProcess[str]:
    """Profile the program. nsys can hang with these options, and then leaves its agent, or fail by itself: 2022.4 did
    in five runs of five, so that the newest release alone is asked.
    """
    words = ["--trace=osrt", "--sample=none", "--cpuctxsw=process-tree", "--export=sqlite", "--force-overwrite=true"]
    for attempt in range(5):
        session = f"time-on-cpu-{os.getpid()}-{attempt}"
        command = [nsys, "profile", f"--session-new={session}", *words, "-o", report, sys.executable, "-c", PROGRAM]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=40)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            failure = f"{error}: {error.stderr!r}"
            subprocess.run(["pkill", "-KILL", "-f", f"session-name={session}"], check=False)
    pytest.fail(f"nsys hung or failed five times, last with {failure}")


def test_time_on_the_cpu(nsys, tmp_path):
    ran = watched(nsys, tmp_path / "run")
    measured = next((int(line) for line in ran.stdout.splitlines() if line.isdecimal()), 0)
    found = nvprof_kit.open(tmp_path / "run.sqlite").tables["scheduled"]
    if found.empty:
        pytest.skip("switches of threads may not be watched here (perf events)")
    assert (found["end_ns"] >= found["start_ns"]).all()
    spent = {
        pid: int((found["end_ns"] - found["start_ns"])[found["pid"] == pid].sum()) for pid in set(found["pid"].tolist())
    }
    # the busiest process is the program; nsys itself works in it too, and begins to watch before the clock does
    assert 0.9 * measured < max(spent.values()) < 1.5 * measured + 200_000_000
