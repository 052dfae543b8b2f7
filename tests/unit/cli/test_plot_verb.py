"""``nvprof-kit plot``: every view in every format, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._cli import main


@pytest.fixture
def capture(tmp_path: Path) -> str:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 7", 50, 250, category="step", payload=7)
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    return str(file.write())


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in argv])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("view", ["layers", "timeline"])
@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_views(view: str, suffix: str, start: bytes, capture: str, tmp_path: Path) -> None:
    assert run("plot", "--view", view, capture, "-o", tmp_path / f"out.{suffix}") == 0
    assert (tmp_path / f"out.{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--view", "timeline", "--step", "3", "-o", "t.png"], "no step 3; it has steps 7 to 7"),
        (["--step", "7", "-o", "t.png"], "--step is for --view timeline; layers shows every step"),
        (["-o", "t.gif"], "t.gif: no format has this suffix; needed one of .png .svg .pdf"),
        (["other.sqlite", "-o", "t.png"], "a plot shows one capture, not 2"),
    ],
)
def test_refusals(words: list[str], complaint: str, capture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plot", capture, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
