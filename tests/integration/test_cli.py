"""The command line as a process of its own: pipes, signals, and Python programs under the recorder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.cli import NVPROF_KIT, environment, execute

QUIET = {"KINETO_LOG_LEVEL": "6"}

WORK = """
import sys, os
assert "torch" not in sys.modules
print("argv", sys.argv, "path0", repr(sys.path[0]), "name", __name__, flush=True)
import torch, nvprof_kit
with nvprof_kit.step(0):
    torch.ones(2) + 1
"""


def record(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return execute(*NVPROF_KIT, "record", "-o", "run.json", "--", sys.executable, *command, cwd=cwd, **QUIET)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    file = NsysFile(tmp_path / "run.sqlite")
    for number in range(500):
        file.range_(f"layers.{number}", 100 * number, 100 * number + 50, category="forward")
        file.kernel(100 * number, 100 * number + 60, launched=(100 * number + 10, 100 * number + 20))
    return file.write()


class TestReading:
    @pytest.mark.parametrize("form", ["table", "csv", "json", "md", "parquet"])
    def test_a_reader_that_goes_away_early(self, form, capture, tmp_path):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*NVPROF_KIT, "layers", str(capture), "--format", form],
            env=environment(), cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        os.close(writer)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")

    @pytest.mark.parametrize(("verb", "status"), [("layers", 0), ("no-such-verb", 2)])
    def test_with_stderr_closed(self, verb, status, capture, tmp_path):
        done = execute("sh", "-c", 'exec "$@" 2>&-', "sh", *NVPROF_KIT, verb, capture, cwd=tmp_path)
        assert done.returncode == status
        assert ("499 " in done.stdout) == (status == 0)

    def test_a_terminal_that_knows_only_ascii(self, capture, tmp_path):
        done = execute(*NVPROF_KIT, "layers", capture, cwd=tmp_path, PYTHONIOENCODING="ascii", COLUMNS="120")
        assert done.returncode == 0 and "####" in done.stdout


class TestRecording:
    @pytest.mark.slow
    def test_a_script_finds_the_world_as_without_the_recorder(self, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "neighbour.py").write_text("")
        (tmp_path / "sub" / "train.py").write_text(WORK + "import neighbour\nsys.exit(7)")
        plain = execute(sys.executable, "sub/train.py", "--lr", "3", cwd=tmp_path, **QUIET)
        done = record(tmp_path, "sub/train.py", "--lr", "3")
        assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) and done.returncode == 7
        assert done.stderr == "nvprof-kit record: wrote run.json; next: nvprof-kit layers run.json\n"
        assert "nvprof_kit:step:step 0" in (tmp_path / "run.json").read_text()

    @pytest.mark.slow
    def test_a_forked_process_ends_as_without_the_recorder(self, tmp_path):
        (tmp_path / "train.py").write_text(
            WORK + "import os, sys\nif os.fork() == 0:\n    print('child')\n    sys.exit(3)\nprint(os.wait()[1] >> 8)"
        )
        done = record(tmp_path, "train.py")
        assert done.stdout.splitlines()[-2:] == ["child", "3"], done.stderr
        assert done.stderr.count("wrote run.json") == 1
