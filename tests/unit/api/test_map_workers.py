"""The processes that map captures: they run nothing of the program that starts them, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._api.job_maps import MapTask
from nvprof_kit._api.map_workers import map_in_processes
from nvprof_kit.errors import CaptureError, ToolError

MS = 1_000_000
PROGRAM = """
import sys, nvprof_kit
print("once")
print(len(nvprof_kit.open_job(sys.argv[1], workers=2).ranks))
"""


def capture(folder: Path, rank: int) -> Path:
    file = NsysFile(folder / f"run.rank{rank}.sqlite")
    file.range_("layers.0", 0, 2 * MS, category="forward")
    file.kernel(MS, 2 * MS, launched=(100_000, 110_000))
    return file.write()


class Instead:
    """A task that does something else in the process that reads it."""

    capture = "run.sqlite"

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_script_without_a_main_guard_runs_once(tmp_path, way):
    for rank in (0, 1):
        capture(tmp_path, rank)
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script) if way == "file" else "-", str(tmp_path)]
    done = subprocess.run(command, input=PROGRAM, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n2\n", "")


def test_the_error_of_a_capture_is_that_of_the_job(tmp_path):
    (tmp_path / "broken.rank1.sqlite").write_text("nothing")
    paths = capture(tmp_path, 0), tmp_path / "broken.rank1.sqlite"
    tasks = [MapTask(str(path), str(tmp_path / "maps")) for path in paths]
    found = map_in_processes(tasks, 2)
    assert len(next(found)) == 1
    with pytest.raises(CaptureError, match=r"broken\.rank1\.sqlite"):
        next(found)


def test_an_unforeseen_error_says_where_it_happened():
    with pytest.raises(AttributeError) as caught:
        next(map_in_processes([Instead(str, "text")], 1))  # type: ignore[list-item]
    assert "in map_capture" in str(caught.value.__cause__)


def test_a_killed_process_is_named():
    with pytest.raises(
        ToolError, match=r"run\.sqlite: the process that maps it was ended by SIGKILL; if memory ran out"
    ):
        next(map_in_processes([Instead(signal.raise_signal, signal.SIGKILL)], 1))  # type: ignore[list-item]


def test_what_a_process_prints_is_no_answer(capfd):
    with pytest.raises(AttributeError):
        next(map_in_processes([Instead(os.write, 1, b"printed\n")], 1))  # type: ignore[list-item]
    assert capfd.readouterr() == ("", "printed\n")


def test_the_processes_end_with_an_interrupted_program(tmp_path):
    marker = tmp_path / "begun"
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    program = (
        f"import sys; sys.path[:] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_map_workers import Instead\n"
        "from nvprof_kit._api.map_workers import map_in_processes\n"
        f"next(map_in_processes([Instead(exec, {code!r})], 1))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 30
        while not (marker.exists() and marker.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        _, shown = running.communicate(timeout=60)
    assert (running.returncode, shown.count("Traceback")) == (-signal.SIGINT, 1), shown
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
