"""``nvprof-kit export`` and ``plot``: every form and view, and what they refuse."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.captures import tiny_ranks
from support.captures.nsys_file import NsysFile
from support.cli import run


@pytest.fixture
def capture(tmp_path: Path) -> str:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 7", 50, 250, category="step", payload=7)
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    return str(file.write())


def test_the_suffix_decides_whether_it_is_packed(capture: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    assert run("export", capture, "-o", plain) == run("export", capture, "-o", packed) == 0
    assert json.loads(plain.read_bytes()) == json.loads(gzip.decompress(packed.read_bytes()))


@pytest.mark.parametrize(
    "words",
    [
        ["--format", "json", "-o", "t.bin"],
        ["--step", "7", "-o", "t.json"],
        ["--steps", "7", "-o", "t.json"],
    ],
)
def test_a_format_and_a_choice_of_steps(words: list[str], capture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(capture).parent)
    assert run("export", capture, *words) == 0
    events = json.loads(Path(words[-1]).read_bytes())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 7"]


@pytest.mark.parametrize(
    ("verb", "words", "complaint"),
    [
        ("export", ["--step", "7", "--steps", "7", "-o", "t.json"], "one step (--step) and several (--steps)"),
        ("export", ["--steps", "+1:", "-o", "t.json"], "none of the requested steps is in it"),
        ("export", ["--step", "3", "-o", "t.json"], "no step 3; it has steps 7 to 7"),
        ("export", ["-o", "t.csv"], "t.csv: no format has this suffix; needed one of .json.gz .gz .json"),
        ("export", ["other.sqlite", "-o", "t.json"], "other.sqlite: no such file"),
        ("export", ["-o", "t.pftrace"], "t.pftrace: no format has this suffix"),
        ("plot", ["--view", "timeline", "--step", "3", "-o", "t.png"], "no step 3; it has steps 7 to 7"),
        ("plot", ["--step", "7", "-o", "t.png"], "--step is for --view timeline; layers shows every step"),
        ("plot", ["-o", "t.gif"], "t.gif: no format has this suffix; needed one of .png .svg .pdf"),
        ("plot", ["other.sqlite", "-o", "t.png"], "a plot shows one capture, not 2"),
    ],
)
def test_refusals(
    verb: str, words: list[str], complaint: str, capture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(verb, capture, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_ranges_of_another_program_by_rules(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("block=3", 100, 200, category=None, domain="theirs")
    file.kernel(300, 330, launched=(110, 115))
    rules = tmp_path / "rules.toml"
    rules.write_text("domain = 'theirs'\n[[rule]]\nmatch = 'block=(?P<number>\\d+)'\nlayer = 'model.{number}'\n")
    out = tmp_path / "trace.json"
    assert run("export", "--rules", rules, file.write(), "-o", out) == 0
    assert '"layer":"model.3"' in out.read_text()
    assert run("report", "--rules", rules, file.path, "-o", tmp_path / "page.html") == 0
    assert 'data-path="model.3"' in (tmp_path / "page.html").read_text()
    assert run("plot", "--rules", rules, file.path, "-o", tmp_path / "layers.svg") == 0


def test_several_ranks_stand_beside_each_other_on_one_clock(tmp_path: Path) -> None:
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
    assert run("export", *captures, "--step", "1", "-o", tmp_path / "step.json") == 0
    steps = [event for event in json.loads((tmp_path / "step.json").read_bytes())["traceEvents"]
             if event.get("cat") == "step"]  # fmt: skip
    assert {event["name"] for event in steps} == {"step 1"}


@pytest.mark.parametrize("view", ["layers", "timeline"])
@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_views(view: str, suffix: str, start: bytes, capture: str, tmp_path: Path) -> None:
    assert run("plot", "--view", view, capture, "-o", tmp_path / f"out.{suffix}") == 0
    assert (tmp_path / f"out.{suffix}").read_bytes().startswith(start)
