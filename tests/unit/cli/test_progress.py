"""Progress is for a person at a terminal, on stderr, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit._cli.output import progress


def test_silence_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as say:
        say("reading [bold]run.sqlite")
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_it_shows_on_stderr_and_the_answer_stays_clean(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run[b].sqlite")
    file.range_("layers.0", 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    capture = file.write()
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "nvprof_kit", "export", str(capture), "-o", str(tmp_path / "trace.json")]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.stdout == b""
    assert "attributing" in shown or "reading" in shown or "writing" in shown
    assert "\x1b[2K" in shown  # the line is taken away again
