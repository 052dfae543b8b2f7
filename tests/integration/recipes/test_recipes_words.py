"""What the verbs make of words that are nearly right: lists, schedules, presets and sets edited by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.recipes import run

PROFILE = "profile -n"


def said(call: str, *argv: str, cwd: Path, **environment: str) -> tuple[int, str]:
    """Exit status, and the one line that is said."""
    script, *words = call.split()
    done = run(script, *words, *argv, "--", "true", cwd=cwd, **{"NSYS": "nsys", "NCU": "/no/ncu", **environment})
    assert not done.stdout or not done.stderr
    return done.returncode, done.stderr or done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--delay", "soon", "Invalid value for '--delay'"),
        ("--step", "99999999999999999999", "Invalid value for '--step'"),
        ("--range", "@torch", "--range '@torch' names no range"),
        ("--schedule", "stabl", "--schedule 'stabl' is none of early, stable, periodic"),
        ("--schedule", "active=3,repeat=x", "--schedule 'active=3,repeat=x' is none of early, stable, periodic"),
    ],
)
def test_what_to_capture_is_checked(option: str, value: str, message: str, tmp_path: Path) -> None:
    status, text = said(PROFILE, option, value, cwd=tmp_path)
    assert status == 2 and text.startswith(f"nvprof-kit: {message}") and text.count("\n") == 1


def test_spaces_in_a_schedule(tmp_path: Path) -> None:
    """The program takes it with spaces too, and the windows would be miscounted."""
    _, text = said(PROFILE, "--schedule", " active=3, repeat = 2", cwd=tmp_path)
    assert text.startswith("NVPROF_KIT_SCHEDULE=active=3,repeat=2 nsys profile") and "=repeat:2 " in text


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("", "'' is no rank"),
        ("7-0", "no rank lies from 7 to 0"),
        ("3,x", "'x' is no rank"),
        ("99999999999999999999", "is no rank"),
    ],
)
def test_a_list_without_ranks(ranks: str, message: str, tmp_path: Path) -> None:
    status, text = said("ranks -n", "--ranks", ranks, cwd=tmp_path, RANK="3")
    assert status == 2 and message in text and text.count("\n") == 1


def test_a_file_named_as_a_preset_or_set(tmp_path: Path) -> None:
    for name in ("train", "base", "tensor"):
        (tmp_path / name).write_text("a program of that name")
    assert "--trace=cuda,nvtx" in said(PROFILE, cwd=tmp_path)[1]
    assert "--section=LaunchStats" in said("ncu -n -s tensor", cwd=tmp_path)[1]
    assert said(f"{PROFILE} -p ./train", cwd=tmp_path)[0] == 2


def test_a_preset_edited_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"# a comment\r\n  --trace=nvtx # why\r\n\r\n\t--env-var=A=#1\t# this")
    assert " --trace=nvtx '--env-var=A=#1' --export" in said(f"{PROFILE} -p mine", cwd=tmp_path)[1]


def test_a_set_edited_elsewhere(tmp_path: Path) -> None:
    text = b"metric a.sum # why\r\n\r\nmetric b.sum sm_80 # not here\r\n  metric c.sum sm_90"
    (tmp_path / "mine").write_bytes(text)
    _, command = said("ncu -n -s mine --arch sm_90", cwd=tmp_path)
    assert "=gpu__time_duration.sum,a.sum,c.sum " in command


@pytest.mark.skipif(os.access("/etc/shadow", os.R_OK), reason="root reads everything")
@pytest.mark.parametrize("call", [f"{PROFILE} -p mine", "ncu -n -s mine"])
def test_a_file_that_may_not_be_read(call: str, tmp_path: Path) -> None:
    (tmp_path / "mine").touch(0o200)
    status, text = said(call, cwd=tmp_path)
    assert status == 2 and text.endswith(": mine: no permission to read it\n")


@pytest.mark.parametrize("line", ["metric", "section # which", "sections SpeedOfLight x", "metric a.sum sm90"])
def test_a_line_of_a_set_that_is_none(line: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(line)
    status, text = said("ncu -n -s mine", cwd=tmp_path)
    assert status == 2 and text.startswith("nvprof-kit: mine: ") and text.count("\n") == 1
