"""A scrubbed copy: nothing private is left in any byte of it, and every verb reads the same from it."""

import lzma
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.captures.nsys_file import NsysFile, thread

import nvprof_kit
from nvprof_kit import scrub
from nvprof_kit._cli import group
from nvprof_kit.errors import CaptureError, UsageError

TOLD = [
    "Process was launched by the profiler, see /home/alice smith/tmp/pid_7_stdout.log and stderr.log",
    "only the first pair of cudaProfilerStart/Stop APIs",
]
PRIVATE = ("smith", "user-alice", "hf_SECRET123", "--api-key=K99", "/home/alice", "alice-box", "printed-by-the-program",
           "firefox-of-alice")  # fmt: skip
OURS, OTHER = (thread(pid, pid) & ~0xFFFFFF for pid in (7, 9))
ROWS = {
    "META_DATA_CAPTURE (name TEXT, value TEXT)": [
        ("PROCESS_0:ENVIRONMENT_VARIABLE", 'HF_TOKEN="hf_SECRET123"'),
        ("PROCESS_0:ARGUMENT_0", "--api-key=K99"),
        ("PROCESS_0:WORKING_DIR", "/home/alice"),
        ("DEVICE_DISPLAY_NAME", "alice-box"),
        ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "node"),
        ("TargetInstallDir", "/home/alice smith/nsys/target-linux-x64"),
    ],
    "TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)": [
        ("DeviceEnvironment", "HF_TOKEN=hf_SECRET123;A=b"),
        ("Hostname", "alice-box"),
    ],
    "META_DATA_EXPORT (name TEXT, value TEXT)": [
        ("EXPORT_HOST", "alice-box"),
        ("EXPORT_USER", "user-alice"),
        ("EXPORT_PARAM_INPUT_FILE", "run-alice-box-rank0.nsys-rep"),
        ("EXPORT_PARAM_INPUT_PATH_ABS", "/home/alice/run.nsys-rep"),
    ],
    "DIAGNOSTIC_EVENT (text TEXT)": [(text,) for text in TOLD],
    "StringIds (id INT, value TEXT)": [(9001, "printed-by-the-program"), (9002, "/home/alice/out")],
    "ProcessStreams (globalPid INT, filenameId INT, contentId INT)": [(1, 9002, 9001)],
    "PROCESSES (globalPid INT, pid INT, name TEXT)": [(OURS, 7, "python"), (OTHER, 9, "firefox-of-alice")],
}


@pytest.fixture
def capture(file: NsysFile) -> Path:
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 350, launched=(110, 120))
    path = file.write()
    with sqlite3.connect(path) as db:
        for table, rows in ROWS.items():
            db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            db.executemany(f"INSERT INTO {table.split()[0]} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    assert all(text.encode() in path.read_bytes() for text in PRIVATE)
    return path


def privacy(path: Path) -> str:
    """What doctor says of private data in a capture."""
    (findings,) = nvprof_kit.doctor(path).findings.values()
    return "; ".join(finding.evidence for finding in findings if finding.rule == "privacy")


def test_nothing_private_is_left_in_any_byte(capture, tmp_path):
    before = capture.read_bytes()
    removed = scrub(capture, tmp_path / "clean.sqlite")
    assert [text for text in PRIVATE if text.encode() in (tmp_path / "clean.sqlite").read_bytes()] == []
    assert capture.read_bytes() == before
    assert removed["environment variables"] == 1 and removed["names of other processes"] == 1
    with sqlite3.connect(tmp_path / "clean.sqlite") as db:
        kept = dict(db.execute("SELECT name, value FROM META_DATA_CAPTURE"))
        assert db.execute("SELECT name FROM PROCESSES").fetchall() == [("python",)]
        told = [text for (text,) in db.execute("SELECT text FROM DIAGNOSTIC_EVENT")]
    assert told == ["Process was launched by the profiler, see (scrubbed)", TOLD[1]]
    assert kept["CUDA_GRAPH_TRACE_OPTIONS:MODE"] == "node"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean.sqlite", "run.sqlite"]


def test_the_table_is_the_same_and_a_text_of_choice_goes_too(capture, tmp_path):
    scrub(capture, tmp_path / "clean.sqlite.xz")
    rows = [nvprof_kit.open(path).layers().rows for path in (capture, tmp_path / "clean.sqlite.xz")]
    assert rows[0].equals(rows[1])
    scrub(capture, tmp_path / "clean.sqlite", also="^layers")
    assert b"layers.0" not in (tmp_path / "clean.sqlite").read_bytes()
    with pytest.raises(UsageError, match="not a regular expression"):
        scrub(capture, tmp_path / "x.sqlite", also="(")


def test_what_is_no_capture(tmp_path):
    (tmp_path / "bad.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(CaptureError, match="not a whole SQLite export"):
        scrub(tmp_path / "bad.sqlite", tmp_path / "clean.sqlite")
    (tmp_path / "bad.sqlite.xz").write_bytes(lzma.compress(b"x" * 100)[:-9])
    with pytest.raises(CaptureError, match="cut off or damaged"):
        scrub(tmp_path / "bad.sqlite.xz", tmp_path / "clean.sqlite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.sqlite", "bad.sqlite.xz"]


def test_names_are_told_and_values_never(capture):
    assert "2 environment variables with their values, among them HF_TOKEN" in privacy(capture)
    assert "hf_SECRET123" not in str(nvprof_kit.doctor(capture).to_frame().to_dict())


def test_the_verb(capture):
    def ask(*argv: str) -> tuple[int, str]:
        done = CliRunner().invoke(group, ["scrub", *argv])
        return done.exit_code, done.output + str(done.exception or "")

    assert ask(str(capture))[0] == 0
    assert capture.with_name("run.scrubbed.sqlite").exists()
    assert "exists; remove it, or choose another name" in ask(str(capture))[1]
    assert "is the capture itself; choose another name" in ask(str(capture), "-o", str(capture))[1]
    commands = "nsys export -t sqlite run.nsys-rep && nvprof-kit scrub run.sqlite"
    assert f"only an .sqlite export can be scrubbed: {commands}" in ask("run.nsys-rep")[1]


def test_what_stands_beside_the_target_is_clean_and_as_private_as_the_source(capture, tmp_path, monkeypatch):
    def refuse(partial: Path, _: Path) -> None:
        written.append((partial.read_bytes(), partial.stat().st_mode & 0o777))
        raise OSError(28, "No space left on device")

    written: list[tuple[bytes, int]] = []
    capture.chmod(0o600)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UsageError, match="No space left"):
        scrub(capture, tmp_path / "copy.sqlite")
    ((content, mode),) = written
    assert mode == 0o600 and not any(text.encode() in content for text in PRIVATE)
    assert [path.name for path in tmp_path.iterdir()] == ["run.sqlite"]


def test_changes_that_are_not_in_the_file_yet_are_not_lost(capture, tmp_path):
    capture.with_name(f"{capture.name}-wal").write_bytes(b"changes")
    with pytest.raises(CaptureError, match="-wal beside it holds changes"):
        scrub(capture, tmp_path / "copy.sqlite")


def test_scrubs_of_one_capture_at_once(capture, tmp_path):
    targets = [tmp_path / f"clean{number}.sqlite" for number in range(9)]
    with ThreadPoolExecutor(9) as pool:
        removed = list(pool.map(lambda target: scrub(capture, target), targets))
    assert all(one == removed[0] for one in removed)
    assert len({target.read_bytes() for target in targets}) == 1
    assert list(tmp_path.glob(".nvprof-kit-*")) == []


@pytest.mark.parametrize(
    ("table", "column"),
    [("NVTX_EVENTS", "text"), ("DIAGNOSTIC_EVENT", "text"), ("TARGET_INFO_GPU", "name"), ("META_DATA_CAPTURE", "name")],
)
@pytest.mark.parametrize(
    "path",
    [
        "/home/carol/data",
        "C:\\Users\\carol\\data",
        "/mnt/homes/carol/data",
        r'{"folder": "\/home\/carol\/data"}',
        r'{"folder": "C:\\Users\\carol\\data"}',
    ],
)
def test_home_folders_are_found_in_every_text(capture, tmp_path, table, column, path):
    home = "INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'HOME=\"/mnt/homes/carol\"')"
    with sqlite3.connect(capture) as db:
        db.execute(home)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (f"reads {path}",))
    if "mnt" not in path:  # a folder elsewhere is known from the environment only
        assert "carol" in privacy(capture)
    scrub(capture, tmp_path / "clean.sqlite")
    assert b"carol" not in (tmp_path / "clean.sqlite").read_bytes()


@pytest.mark.parametrize("table", ["TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "META_DATA_EXPORT"])
def test_private_data_under_another_name_is_refused(capture, tmp_path, table):
    with sqlite3.connect(capture) as db:
        db.execute(f"ALTER TABLE {table} RENAME COLUMN value TO content")
    with pytest.raises(CaptureError, match=f"{table} has no column value, so private data in it would stay"):
        scrub(capture, tmp_path / "clean.sqlite")
    assert not (tmp_path / "clean.sqlite").exists()
