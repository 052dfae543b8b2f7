"""The files of a window appear whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvprof_kit._profiler.files import WindowFiles
from nvprof_kit._report.text import layer_profile
from nvprof_kit._report.text import table as terminal


def test_a_log_that_ends_half_way_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_profile, "profile_report", lambda *_: ["first line", "second line"])
    written = terminal.print_to

    def killed(file: Any, parts: Any, to_file: bool = False) -> None:
        written(file, list(parts)[:1], to_file)
        raise KeyboardInterrupt

    files, profile = WindowFiles(tmp_path, "steps_1_2", 0), SimpleNamespace()
    files.write_log(profile, [], echo=False)  # type: ignore[arg-type]
    log = tmp_path / "steps_1_2_rank_0.log"
    before = log.read_text()
    assert before == "first line\nsecond line\n"
    monkeypatch.setattr(terminal, "print_to", killed)
    with pytest.raises(KeyboardInterrupt):
        files.write_log(profile, [], echo=False)  # type: ignore[arg-type]
    assert log.read_text() == before and [path.name for path in tmp_path.iterdir()] == [log.name]
