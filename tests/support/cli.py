"""Runs the command line in this process."""

from __future__ import annotations

import pytest

from nvprof_kit._cli import main


def run(*words: object) -> int:
    """The exit status of ``nvprof-kit WORDS``; what it prints is in the fixture ``capsys``."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)
