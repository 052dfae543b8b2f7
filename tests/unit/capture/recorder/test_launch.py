"""How a Python command line becomes one under the recorder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nvprof_kit._capture.recorder.launch import PythonCommand, parse_python, record_program, runner_argv
from nvprof_kit._capture.recorder.record import RecordOptions
from nvprof_kit.errors import ToolError, UsageError


@pytest.mark.parametrize(
    ("line", "interpreter", "target", "arguments"),
    [
        ("python train.py", "python", "train.py", ""),
        ("python3.11 -u train.py --lr 3 -m x", "python3.11 -u", "train.py", "--lr 3 -m x"),
        ("/a/b/python3 -m pkg.train -o y", "/a/b/python3", "-m pkg.train", "-o y"),
        ("python -X dev -W ignore -um pkg -- z", "python -X dev -W ignore -u", "-m pkg", "-- z"),
        ("python -Xdev -OO -mpkg a", "python -X dev -OO", "-m pkg", "a"),
        ("python -c code a b", "python", "-c code", "a b"),
        ("python --check-hash-based-pycs never t.py", "python --check-hash-based-pycs never", "t.py", ""),
        ("python3.14t t.py", "python3.14t", "t.py", ""),
    ],
)
def test_parse_python(line: str, interpreter: str, target: str, arguments: str) -> None:
    parts = (tuple(part.split()) for part in (interpreter, target, arguments))
    assert parse_python(line.split()) == PythonCommand(*parts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no program to record"),
        ("torchrun train.py", "torchrun is not a Python interpreter"),
        ("./train.py", "./train.py is not a Python interpreter"),
        ("python", "`python` names no program"),
        ("python -u", "`python -u` names no program"),
        ("python -", "`python -` names no program"),
    ],
)
def test_what_cannot_be_recorded(line: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_python(line.split())
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_runner_argv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    argv = runner_argv(
        Path("r.json"), RecordOptions(shapes=True), parse_python(["python", "-u", "train.py", "--lr", "3"])
    )
    settings = argv.pop(4)
    assert argv == ["python", "-u", "-m", "nvprof_kit._capture.recorder.runner", "train.py", "--lr", "3"]
    assert json.loads(settings) == {
        "path": f"{tmp_path}/r.json",
        "stacks": False,
        "shapes": True,
        "memory": False,
        "limits": {"schedule": "", "seconds": 0, "memory_mb": 500},
    }


@pytest.fixture
def script(tmp_path: Path) -> str:
    (path := tmp_path / "train.py").write_text("")
    return str(path)


def interpreter(tmp_path: Path, body: str) -> str:
    """An executable named like an interpreter."""
    (path := tmp_path / "python3").write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def refusal(*command: str, path: str = "run.json") -> tuple[str, int]:
    with pytest.raises((UsageError, ToolError)) as refused:
        record_program(Path(path), RecordOptions(), command)
    return str(refused.value), refused.value.exit_code


def test_an_interpreter_without_torch(script: str, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo torch >&2; exit 1")
    assert refusal(python, script) == (f"{python} has no torch; {python} -m pip install torch", 3)


def test_a_trace_that_cannot_be_written_is_found_out_before(script: str, tmp_path: Path) -> None:
    message, code = refusal(sys.executable, script, path=f"{tmp_path}/no/run.json")
    assert (message, code) == (f"{tmp_path}/no/run.json: no directory {tmp_path}/no; make it first", 2)
    assert "name it .json or .json.gz" in refusal(sys.executable, script, path="run.sqlite")[0]
