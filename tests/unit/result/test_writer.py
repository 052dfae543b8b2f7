"""One writer for every file: never over an input, whole or not at all."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.cli import execute

from nvprof_kit._result.writer import WriteError, write_file, writing
from nvprof_kit.errors import UsageError

ROOT = Path(__file__).parents[4]


@pytest.fixture
def run(file: NsysFile) -> Path:
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    return file.write()


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("umask")
def test_the_umask_holds_for_files_and_scripts(tmp_path):
    plain, script = write_file(tmp_path / "a", "x"), write_file(tmp_path / "b", "x", executable=True)
    assert stat.S_IMODE(plain.stat().st_mode) == 0o600
    assert stat.S_IMODE(script.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("run.nsys-rep", "run.sqlite"),
        ("run.nsys-rep.xz", "run.sqlite"),
        ("run.nsys-rep", "run.sqlite.xz"),
        ("run.sqlite", "run.nsys-rep"),
        ("run.sqlite.xz", "run.nsys-rep"),
        ("run.sqlite", "run.sqlite-wal"),
        ("run.nsys-rep", "run.sqlite-wal"),
    ],
)
def test_what_belongs_to_an_input_is_refused_too(tmp_path, source, target):
    (tmp_path / source).touch()  # the target need not be there yet: the export of a report is made when it is read
    with pytest.raises(UsageError, match="belongs to the input"):
        write_file(tmp_path / target, "answer", inputs=[tmp_path / source])
    assert left(tmp_path) == [source]


def test_what_fails_half_way_leaves_the_old_file(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(RuntimeError), writing(target) as file:
        file.write(b"ne")
        raise RuntimeError
    assert target.read_text() == "old" and left(tmp_path) == ["a"]


def test_no_planted_name_is_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("safe")
    monkeypatch.setattr("nvprof_kit._result.writer.secrets.token_hex", lambda _: "known")
    (tmp_path / ".nvprof-kit-known.tmp").symlink_to(victim)
    with pytest.raises(WriteError, match="cannot write it"):
        write_file(tmp_path / "a", "x")
    assert victim.read_text() == "safe"


def test_what_is_no_file_is_written_as_it_is(tmp_path):
    assert write_file("/dev/null", "x") == Path("/dev/null")
    assert not Path("/dev/null").is_file()


def limited(size: int, *argv: object) -> subprocess.CompletedProcess[str]:
    """Our command line with a limit on the size of files, as a full disk has one."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        f"from nvprof_kit._cli import main; main({[str(one) for one in argv]!r})"
    )
    return execute(sys.executable, "-c", code, cwd=ROOT)


def test_a_full_disk_keeps_the_old_file(run):
    target = run.with_name("layers.csv")
    target.write_text("old")
    done = limited(16, "layers", run, "-o", target)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "cannot write it: File too large; the file that was there is unchanged" in done.stderr
    assert target.read_text() == "old" and left(run.parent) == ["layers.csv", "run.sqlite"]


@pytest.mark.parametrize("form", ["table", "csv"])
def test_a_full_stdout_is_one_line(run, form):
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "nvprof_kit", "layers", str(run), "--format", form]
        done = subprocess.run(words, check=False, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "nvprof-kit: stdout: cannot write it: No space left on device; the output is incomplete\n"
