"""Every verb says of a file that it does not read what that is, and of a capture without a GPU what it lacks."""

import gzip
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.captures.nsys_file import NsysFile
from support.cli import run
from support.data import DATA, unpacked

import nvprof_kit
from nvprof_kit._cli import group
from nvprof_kit.errors import CaptureError, NvprofKitError

NSYS = "an SQLite file, as nsys exports: `nvprof-kit layers` and similar commands read it"
TRACE = "a PyTorch trace: `nvprof-kit layers` and similar commands read it"
SAID = {
    "run.sqlite": NSYS,
    "run.sqlite.xz": NSYS,
    "trace.json": TRACE,
    "trace.json.gz": TRACE,
    "trace.json.xz": TRACE,
    "run.pickle": "a pickle: `nvprof-kit memory` reads snapshots of PyTorch's allocator",
    "page.csv": "a page of ncu: `nvprof-kit ncu layers` reads it",
    "page.csv.xz": "a page of ncu: `nvprof-kit ncu layers` reads it",
    "run.ncu-rep": "an ncu report: `nvprof-kit ncu layers` reads it",
    "run.flops.json": "counted operations: `nvprof-kit flops CAPTURE --counts FILE` reads them",
    "timer_rank0.log": "a log of global_timer: `nvprof-kit timers` reads it",
    "run.flight": "a dump of PyTorch's Flight Recorder: no verb reads it",
    "layers.json": "an answer of nvprof-kit: it is the end of the way; name the capture that it was made of",
    "layers.csv": "a table of ours as csv: it is the end of the way; name the capture that it was made of",
    "page.html": "a page of HTML: a browser shows it",
    "plot.png": "a picture: no verb reads it",
}
"""Each kind of file, and what is said of it."""

CAPTURES = {"run.sqlite", "run.sqlite.xz", "trace.json", "trace.json.gz", "trace.json.xz"}
ONLY_NSYS = {"run.sqlite", "run.sqlite.xz"}
PAGES = {"page.csv", "page.csv.xz", "run.ncu-rep"}
VERBS = {
    "layers": CAPTURES,
    "summary": CAPTURES,
    "breakdown": CAPTURES,
    "advise": CAPTURES,
    "flops": CAPTURES,
    "diff {} ": CAPTURES,
    "report -o OUT.html": CAPTURES,
    "plot -o OUT.png": CAPTURES,
    "export -o OUT.json": CAPTURES,
    "ranks": CAPTURES,
    "metrics": ONLY_NSYS,
    "ncu plan": ONLY_NSYS,
    "doctor": CAPTURES,
    "scrub": ONLY_NSYS,
    "ncu layers": PAGES,
    "memory": {"run.pickle"},
    "timers": {"timer_rank0.log"},
}
"""Each verb that reads files, and the kinds that it reads."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")

    packed = {"run.sqlite": "gpt2-2023.4.sqlite.xz", "trace.json": "kineto/ddp.rank0.json.xz"}
    packed |= {"run.pickle": "snapshots/run-2.11.pickle.xz", "page.csv": "ncu/layer-2025.3.csv.xz"}
    for name, source in {**packed, "run.ncu-rep": "ncu/own-2025.3.ncu-rep.xz"}.items():
        unpacked(source, folder / name)
    (folder / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes(), 1))
    copies = {
        "run.sqlite.xz": "gpt2-2023.4.sqlite.xz",
        "trace.json.xz": "kineto/ddp.rank0.json.xz",
        "page.csv.xz": "ncu/layer-2025.3.csv.xz",
        "run.flops.json": "flops/checkpoint-2024.2.flops.json",
    }
    for name, source in copies.items():
        (folder / name).write_bytes((DATA / source).read_bytes())
    dump = {"version": "2.10", "pg_config": {"0": {"name": "0"}}, "entries": []}
    (folder / "run.flight").write_bytes(pickle.dumps(dump, 2))
    (folder / "timer_rank0.log").write_text("[RANK 0] a, start=1.5, end=2.5, cpu_dur=1.0s, cuda_dur=9.0ms\n")
    (folder / "layers.json").write_text('{\n"schema": "nvprof-kit/layers",\n"version": 1,\n"rows": []\n}\n')
    (folder / "layers.csv").write_text("layer,phase,calls,gpu_self_ns\n")
    (folder / "page.html").write_text("<!DOCTYPE html>\n")
    (folder / "plot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_says_what_it_cannot_read(verb, files):
    for name in SAID.keys() - VERBS[verb]:
        words = verb.format(files / "run.sqlite").replace("OUT", str(files / "out")).split()
        done = CliRunner().invoke(group, [*words, str(files / name)])
        assert isinstance(done.exception, CaptureError), (verb, name, done.output)
        assert str(done.exception).startswith(f"{files / name}: {SAID[name]}; needed "), (verb, name)
        assert "\n" not in str(done.exception)


def test_every_verb_that_reads_files_is_tried():
    other = {"profile", "session", "record", "recipes"}
    assert {*group.commands} - other == {verb.split()[0] for verb in VERBS}, "a new verb: add it to VERBS"


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("layers", "a directory without tables of nsys"),
        ("ncu layers", "a directory; needed a raw"),
        ("doctor", "not a"),
    ],
)
def test_a_folder_without_tables_is_no_capture(verb, said, tmp_path):
    assert f"{tmp_path}: {said}" in str(CliRunner().invoke(group, [*verb.split(), str(tmp_path)]).exception)


def test_what_is_not_known_is_left_to_its_reader(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\x01\x02")
    (tmp_path / "torn.json.gz").write_bytes(b"\x1f\x8b\x08\x00")
    for name in ("a", "torn.json.gz", "missing"):
        message = str(CliRunner().invoke(group, ["layers", str(tmp_path / name)]).exception)
        assert message.startswith(str(tmp_path / name)) and not any(sentence in message for sentence in SAID.values())


@pytest.mark.slow
def test_doctor_does_not_take_a_script_for_a_capture(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    done = CliRunner().invoke(group, ["doctor", "--", "python", str(tmp_path / "train.py")])
    assert not isinstance(done.exception, CaptureError)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--measure"], 3, "needs a GPU that PyTorch can use"),
        (["--measure", "gone"], 2, "gone: no such folder"),
        (["run.sqlite", "--measure", "."], 2, "measures this machine, not a capture"),
    ],
)
def test_doctor_has_nothing_to_measure(words, code, line, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sqlite").write_bytes(b"SQLite format 3\x00")
    with pytest.raises(NvprofKitError, match=line) as caught:
        CliRunner().invoke(group, ["doctor", *words], catch_exceptions=False, standalone_mode=False)
    assert caught.value.exit_code == code
    assert not (tmp_path / "gpu_peaks.json").exists()


def capture(path: Path, *, calls: bool = False) -> Path:
    """Two steps of 100 ns, a layer of 40 and 50 in them; with CUDA calls, or without the tables of CUDA."""
    file = NsysFile(path)
    for step in range(2):
        begin = 1000 * step
        file.range_(f"step {step}", begin, begin + 100, category="step")
        file.range_("layers.0", begin + 10, begin + 50 + 10 * step)
    if calls:
        file.call("cudaGetDevice", 5, 6)
    return file.write()


@pytest.mark.parametrize("calls", [False, True])
def test_layers_gives_the_cpus_times(calls, tmp_path):
    opened = nvprof_kit.open(capture(tmp_path / "run.sqlite", calls=calls))
    result = opened.layers()
    rows = result.to_frame().set_index("layer")
    assert rows.loc["layers.0", ["calls", "gpu_ops", "gpu_self_ns", "cpu_ns"]].tolist() == [2, 0, 0, 90]
    assert sum("no kernel" in one or "no GPU operations" in one for one in result.warnings) == 1
    assert len(opened.tables["ranges"]) == 4 and opened.tables["ops"].empty


NEED_A_GPU = "breakdown,summary,advise,export,report,metrics,flops,diff,ncu plan,layers --columns memory"


@pytest.mark.parametrize("verb", NEED_A_GPU.split(","))
def test_every_other_verb_says_what_is_missing_in_one_line(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(capture(tmp_path / "run.sqlite"))
    more = [path] if verb == "diff" else ["-o", "out.json.gz"] if verb == "export" else []
    assert run(*verb.split(), path, *more) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"nvprof-kit: {path}: ") or path in line
    assert "GPU" in line or "FLOPs" in line
