"""What verbs write, in which form and where it goes; and what they refuse, in one line."""

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.captures import tiny_ranks
from support.captures.nsys_file import NsysFile
from support.cli import run

import nvprof_kit
from nvprof_kit._cli.verb import Output
from nvprof_kit.errors import UsageError

NCU = Path(__file__).parents[2] / "data" / "ncu"
PLAN, RUN = NCU / "plan-2025.3.csv.xz", NCU / "run-2023.4.sqlite.xz"


@pytest.fixture
def capture(file: NsysFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A capture of one step, in the current folder."""
    file.range_("step 7", 50, 250, category="step", payload=7)
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    file.kernel(400, 410, launched=(220, 225))
    monkeypatch.chdir(tmp_path)
    return str(file.write())


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run(*argv) == 0
    captured = capsys.readouterr()
    assert all(line.startswith("! ") for line in captured.err.splitlines())
    return captured.out


LAYERS = [
    "layer,phase,calls,gpu_ops,gpu_self_ns,compute_ns,comm_ns,copy_ns,gpu_total_ns,gpu_busy_ns,cpu_ns,share,"
    "total_share,steps",
    "layers.0,forward,1,1,30,30,0,0,30,30,100,0.75,0.75,1",
    "(none),other,0,1,10,10,0,0,10,10,0,0.25,0.25,1",
]
"""The columns of the contract, and the rows of `capture`."""


def test_csv_has_the_columns_of_the_contract(capture, capsys):
    assert answer(capsys, "layers", capture, "--format", "csv").splitlines() == LAYERS


@pytest.mark.parametrize("form", ["csv", "json", "md"])
def test_several_captures_in_one_table(form, capture, capsys):
    out = answer(capsys, "layers", capture, capture, "--format", form)
    # two rows of each; the warning, which is the same of both, and in json what it was made of
    assert out.count(capture) == {"csv": 4, "md": 5, "json": 7}[form]


@pytest.mark.parametrize("suffix", ["csv", "json", "md", "txt"])
def test_the_file_holds_what_stdout_would(suffix, capture, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # the width of stdout alone
    printed = answer(capsys, "layers", capture, "--format", "table" if suffix == "txt" else suffix)
    path = Path(f"out.{suffix}")
    path.write_text("something else, and longer than the answer\n" * 100)
    assert answer(capsys, "layers", capture, "-o", path) == ""
    assert path.read_text(encoding="utf-8") == printed


def test_what_has_no_place_for_warnings_leaves_them_on_stderr(capture, capsys):
    """The table ends with them; data and pictures are data and pictures alone."""
    run("layers", capture)
    table = capsys.readouterr()
    warnings = [line for line in table.out.splitlines() if line.startswith("! ")]
    assert len(warnings) == 1 and table.err == ""
    for argv in (("--format", "csv"), ("-o", "a.parquet"), ("-o", "a.svg")):
        run("layers", capture, *argv)
        data = capsys.readouterr()
        assert data.err.splitlines() == warnings and "! " not in data.out
    run("layers", capture, "--format", "json")
    data = capsys.readouterr()
    assert data.err == "" and json.loads(data.out)["warnings"] == [warnings[0][2:]]
    run("layers", capture, "--format", "md")
    data = capsys.readouterr()
    assert data.err == "" and data.out.endswith(f"\n> {warnings[0][2:]}\n")
    run("layers", capture, capture, "--format", "csv")
    assert capsys.readouterr().err.splitlines() == [f"! {capture}: {warnings[0][2:]}"]


@pytest.mark.parametrize("stderr", ["/dev/full", "|true"])
def test_a_stderr_that_takes_nothing_changes_no_status(stderr, capture):
    words = [sys.executable, "-m", "nvprof_kit", "layers", capture, "-o", "a.csv"]
    where = f"2>&1 >/dev/null {stderr}" if stderr.startswith("|") else f"2>{stderr}"
    done = subprocess.run(["bash", "-c", f"{shlex.join(words)} {where}; exit ${{PIPESTATUS[0]}}"], check=False)
    assert done.returncode == 0 and Path("a.csv").stat().st_size


def test_parquet_is_not_for_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match=r"with -o \(.*\.parquet"):
        Output.of("parquet", None)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("layers CAPTURE CAPTURE -o a.png", "a plot shows one capture, not 2"),
        ("layers CAPTURE -o a.xlsx", "needed one of .txt .csv .json .md .parquet .png .svg .pdf, or --format"),
        ("layers CAPTURE -o no/a.csv", "cannot write it: No such file or directory"),
        ("layers CAPTURE -o . --format table", "cannot write it: Is a directory"),
        ("layers CAPTURE --rules nowhere.toml", "no such file, and no preset; available: deepspeed, emit-nvtx"),
        ("layers CAPTURE --columns memory", "no memory in this capture; record it with"),
        ("export CAPTURE --steps +1: -o t.json", "none of the requested steps is in it"),
        ("export CAPTURE -o t.pftrace", "no format has this suffix; needed one of .json.gz .gz .json, or --format"),
        ("export CAPTURE other.sqlite -o t.json", "other.sqlite: no such file"),
        ("plot CAPTURE --steps 3 -o t.png", "none of the requested steps is in it; it has 1 steps, 7"),
        ("plot CAPTURE -o t.gif", "t.gif: no format has this suffix; needed one of .png .svg .pdf\n"),
        ("plot CAPTURE other.sqlite -o t.png", "a plot shows one capture, not 2"),
        ("report CAPTURE CAPTURE CAPTURE -o t.html", "a page is about a capture, or compares two, not 3"),
        ("ncu layers PLAN -o a.png", "no kernel with both operations and bytes of DRAM counted"),
        ("ncu layers none.csv", "no such file"),
        ("ncu layers PLAN --by kernel -o a.svg", "nvprof-kit ncu layers REPORT -o roofline.png"),
        ("ncu plan RUN RUN", "a plan needs one capture, not 2"),
        ("ncu plan RUN --share 1", "--share 1 cannot be reached"),
        ("ncu plan RUN --share 0", "--share 0: needed a finite number, above 0 and at most 1"),
        ("layers CAPTURE --steps 5:3", "--steps 5:3: the second number must be the larger, as in 5:20 (5 to 19)"),
        ("diff CAPTURE CAPTURE --run-noise inf", "needed a finite number"),
        ("layers CAPTURE --top 0", "Invalid value for '--top'"),
        ("layers CAPTURE --where model.*", "--where model.*: no layer matches; available: layers.0"),
        ("layers CAPTURE --sort colour --format csv", "--sort colour: no such column; available: layer, phase"),
        ("layers CAPTURE --columns class --by step", "--columns splits the time of all steps"),
        ("breakdown CAPTURE --sort colour", "no such column"),
        ("diff RUN RUN --where nosuch", "no layer matches"),
        ("diff CAPTURE", "BASE1 BASE2 --vs NEW1 NEW2"),
        ("diff CAPTURE CAPTURE CAPTURE", "BASE1 BASE2 --vs NEW1 NEW2"),
        ("diff --vs CAPTURE", "Missing argument"),
        ("diff CAPTURE RUN", "cannot be compared"),
        ("ranks map none.sqlite -o maps --rank a.sqlite=99999999999999999999", "needed FILE=N"),
        ("summary CAPTURE --format csv", "name it (--view)"),
        ("summary CAPTURE --sort x", "no such column"),
        ("flops CAPTURE --counts no.json", "no such file"),
        ("ncu plan RUN --script /no/folder/plan.sh", "cannot write it"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, complaint, capture, capsys):
    files = {"CAPTURE": capture, "PLAN": PLAN, "RUN": RUN}
    assert run(*(files.get(word, word) for word in words.split())) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and complaint in captured.err and captured.err.count("\n") == 1


def test_the_suffix_decides_whether_a_trace_is_packed(capture):
    assert run("export", capture, "-o", "trace.json") == run("export", capture, "-o", "trace.json.gz") == 0
    packed = gzip.decompress(Path("trace.json.gz").read_bytes())
    assert json.loads(Path("trace.json").read_bytes()) == json.loads(packed)


@pytest.mark.parametrize("words", ["--format json -o t.bin", "--steps 7 -o t.json"])
def test_a_format_and_a_choice_of_steps(words, capture):
    assert run("export", capture, *words.split()) == 0
    events = json.loads(Path(words.rsplit(maxsplit=1)[-1]).read_bytes())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 7"]


def test_ranges_of_another_program_by_rules(file, tmp_path):
    file.range_("block=3", 100, 200, category=None, domain="theirs")
    file.kernel(300, 330, launched=(110, 115))
    rules = tmp_path / "rules.toml"
    rules.write_text("domain = 'theirs'\n[[rule]]\nmatch = 'block=(?P<number>\\d+)'\nlayer = 'model.{number}'\n")
    for words, text in (
        (("export", "-o", tmp_path / "trace.json"), '"layer":"model.3"'),
        (("report", "-o", tmp_path / "page.html"), 'data-path="model.3"'),
        (("plot", "-o", tmp_path / "layers.svg"), "<svg"),
    ):
        assert run(*words, "--rules", rules, file.write() if words[0] == "export" else file.path) == 0
        assert text in words[-1].read_text()


def test_several_ranks_stand_beside_each_other_on_one_clock(tmp_path):
    # the clock of rank 1 is 5 ms ahead; both all-reduces end at 18 ms of their step on the true clock
    captures = [tiny_ranks.capture(tmp_path, rank, shift=5_000_000 * rank) for rank in (0, 1)]
    assert run("export", *captures, "-o", tmp_path / "job.json") == 0
    events = json.loads((tmp_path / "job.json").read_bytes())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.split(" · ")[0] for name in names.values()] == ["rank 0"] * 2 + ["rank 1"] * 2
    ends: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "operation" and "AllReduce" in event["name"]:
            ends.setdefault(names[event["pid"]][:6], []).append(event["ts"] + event["dur"])
    assert ends["rank 0"] == pytest.approx(ends["rank 1"], abs=0.001) and len(ends["rank 0"]) == 2
    tracks = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(tracks) == len(set(tracks))
    assert run("export", *captures, "--steps", "1", "-o", tmp_path / "step.json") == 0
    events = json.loads((tmp_path / "step.json").read_bytes())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "step"} == {"step 1"}


def test_layers_of_ncu_as_a_table(capsys):
    out = answer(capsys, "ncu", "layers", PLAN, "--capture", RUN, "--depth", 3, "--no-fold")
    assert "71 measured kernels" in out
    assert "they stand for 80.8 % of its 28.06 ms of GPU time" in out
    assert "model.layers.11" in out and "model.layers.11.mlp" not in out


def test_several_reports_are_one_table():
    alone, both = (nvprof_kit.open_ncu(*[NCU / "own-2025.3.csv.xz"] * count).layers() for count in (1, 2))
    assert (both.measured, both.gpu_ns) == (2 * alone.measured, 2 * alone.gpu_ns)


def test_plan_writes_its_script(capsys, tmp_path):
    script = tmp_path / "plan.sh"
    out = answer(capsys, "ncu", "plan", RUN, "--every-layer", "--script", script)
    assert "89 launches represent 90.3 % of the GPU time" in out
    text = script.read_text()
    assert "# 89 launches represent 90.3 % of the GPU time" in text and "--profile-from-start off" in text
    assert script.stat().st_mode & 0o100
