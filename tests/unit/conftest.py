"""An export of nsys that a test writes its events into."""

from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "run.sqlite")
