"""A rank's folder belongs to one process: claimed by processes that really run, die, and are killed."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import execute

from nvprof_kit._instrument import ranks
from nvprof_kit._instrument.ranks import OWNER, claim

CLAIM = """
import sys
from pathlib import Path
from nvprof_kit._instrument.ranks import claim
print(claim(Path(sys.argv[1]) / "rank0_dp0_tp0_pp0").name, flush=True)
sys.stdin.readline()
"""

BUSY = """
import atexit, os, sys, time
from pathlib import Path
from nvprof_kit._instrument.ranks import claim
for turn in range(6):
    child = os.fork()
    if child == 0:  # each turn is a process of its own, and some are killed
        folder = claim(Path(sys.argv[1]) / "rank0")
        mine = f"{sys.argv[2]} {turn}"
        (folder / "log").write_text(mine)
        time.sleep(0.02)
        same = (folder / "log").read_text() == mine
        if turn % 2:
            atexit._run_exitfuncs()
        os._exit(0 if same else 3)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit("two had one folder")
print("fine")
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_claimed", {})


def other(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that claims the folder, and the name that it got."""
    command = [sys.executable, "-W", "ignore", "-c", CLAIM, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_ranks_that_nobody_told_apart_get_folders_of_their_own(tmp_path):
    running = [other(tmp_path) for _ in range(3)]
    names = [name for _, name in running]
    assert len(set(names)) == 3 and names[0] == "rank0_dp0_tp0_pp0"
    assert all(name.startswith("rank0_dp0_tp0_pp0.") for name in names[1:])
    for process, _ in running:
        process.communicate("\n", timeout=60)
    again, name = other(tmp_path)
    assert name == names[0]
    again.communicate("\n", timeout=60)


def test_what_a_killed_process_left_is_taken_over(tmp_path):
    process, name = other(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / name / OWNER).exists()
    assert claim(tmp_path / name) == tmp_path / name
    assert [path.name for path in (tmp_path / name).iterdir()] == [OWNER]


def test_many_at_once(tmp_path):
    """Eight processes that come and go as fast as they can: at no moment do two have the same folder."""
    command = [sys.executable, "-W", "ignore", "-c", BUSY, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(8)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["fine"] * 8


def test_nothing_is_left_open_at_the_end(tmp_path):
    """Python warns at its end of files that nobody closed: the owner's, and a timer's log."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom nvprof_kit._instrument.ranks import claim\n"
        "from nvprof_kit._instrument.meters.timers import GlobalTimer\nfolder = claim(Path(sys.argv[1]))\n"
        "timer = GlobalTimer(folder)\nwith timer.stage('load'):\n    pass\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", program, str(tmp_path / "rank0")]
    done = execute(*command, check=True)
    assert done.stderr == ""
    assert {path.name for path in (tmp_path / "rank0").iterdir()} == {OWNER, "timer_rank0.log"}
    assert "load, start=" in (tmp_path / "rank0" / "timer_rank0.log").read_text()
