"""A real export scrubbed: none of what was planted in the program's surroundings is left in any byte of the copy."""

import pytest
from support.recipes import python, ranges, run

import nvprof_kit

PROGRAM = """
import nvprof_kit
print("planted-output")
with nvprof_kit.step(1), nvprof_kit.layer_range("layers.0"):
    pass
"""


@pytest.mark.every_nsys
def test_nothing_private_is_left(nsys, tmp_path):
    folder = tmp_path / "planted-folder"
    folder.mkdir()
    done = run(
        *("profile", "-x", "--trace=nvtx", "--", *python(PROGRAM, folder, "planted-argument")),
        cwd=folder,
        NSYS=nsys,
        HF_TOKEN="planted-token",
    )
    assert done.returncode == 0, done.stderr
    capture, copy = folder / "run.sqlite", tmp_path / "clean.sqlite"
    assert b"planted-token" in capture.read_bytes()
    assert b"HF_TOKEN" in capture.read_bytes()
    nvprof_kit.scrub(capture, copy)
    assert b"planted" not in copy.read_bytes()
    assert b"HF_TOKEN" not in copy.read_bytes()
    assert ranges(copy) == ranges(capture) == ["step 1", "layers.0"]
