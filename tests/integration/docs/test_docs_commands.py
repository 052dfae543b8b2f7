"""Every command of the documentation runs, or is not run for a reason that is written down."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.cli import execute
from support.docs_commands import PROGRAM, REASONS, ROOT, SCHEDULED, Command, commands, for_command, lay_out, pages

from nvprof_kit._cli import group

FOUND = list(dict.fromkeys(command for page in pages() for command in commands(page)))
FIRST = ("README.md", "docs/index.md", "docs/tutorial.md", "docs/how-to/", "docs/comparison.md")
"""Pages that a newcomer reads: their commands run in every lane, all others in the full one."""


def runs(under_nsys: bool) -> list[object]:
    """The commands to run, each once."""
    lines: dict[str, Command] = {}
    for command in FOUND:
        if (
            command.under_nsys == under_nsys
            and not command.reason
            and (command.line not in lines or command.page.startswith(FIRST))
        ):
            lines[command.line] = command
    return [
        pytest.param(command, id=command.line, marks=() if command.page.startswith(FIRST) else (pytest.mark.full,))
        for command in lines.values()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    place = tmp_path_factory.mktemp("docs")
    lay_out(place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("command", runs(under_nsys=True))
def test_the_command_captures(command, folder, nsys, tmp_path):
    line = command.line
    for said, known in (SCHEDULED if "--schedule" in line else PROGRAM).items():
        line = line.replace(said, known)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join((str(Path(nsys).parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    known = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for verb in ("nvprof-kit profile", "nvprof-kit recipes"):
        line = line.replace(verb, verb.replace("nvprof-kit", f"{sys.executable} -m nvprof_kit"))
    done = subprocess.run(["bash", "-c", line], check=False, capture_output=True, text=True, env=known, cwd=tmp_path)
    assert done.returncode == 0, f"{command.page}: {line}\n{done.stderr[-2000:]}"
    assert list(tmp_path.glob("*.nsys-rep"))


@pytest.mark.slow
@pytest.mark.parametrize("command", runs(under_nsys=False))
def test_the_command_runs(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    line = for_command(command.line, folder)
    words = shlex.split(line)
    assert words[0] == "nvprof-kit", f"{command.page}: {line}: nothing runs this; name the reason in REASONS"
    if words[1] == "record":
        monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        at = words.index("--")
        given = [word for word in words[at + 2 :] if "lr" not in word and "e-4" not in word]
        program = ["record", "--force", *words[2:at], "--", sys.executable, *given, "--steps=2"]
        command = [sys.executable, "-m", "nvprof_kit", *program]
        done = execute(*command)
        assert done.returncode == 0, done.stderr
        return
    # as a shell does: a word that names no file stays
    found = ((sorted(map(str, Path().glob(word))) if "*" in word else []) or [word] for word in words)
    words = [word for some in found for word in some]
    done = CliRunner().invoke(group, words[1:])
    gate = "--fail-on" in words and done.exit_code == 1 and "FAIL" in done.output.upper()
    gate |= words[1] == "doctor" and done.exit_code in (1, 3)  # something is missing on this machine
    assert done.exit_code == 0 or gate, f"{command.page}: {line}\n{done.output[-2000:]}"


def test_the_list_of_what_is_not_run():
    not_run = {command.line: command.reason for command in FOUND if command.reason}
    for line, reason in sorted(not_run.items(), key=lambda one: one[1]):
        print(f"{reason}\n    {line}")
    assert len(not_run) < len({command.line for command in FOUND}) / 2


def test_no_reason_is_left_over():
    idle = [pattern for pattern in REASONS if not any(re.match(pattern, command.line) for command in FOUND)]
    assert idle == []


@pytest.mark.parametrize("page", [page for page in pages() if page.parent.name == "how-to"], ids=lambda page: page.stem)
def test_a_page_that_answers_a_question_has_a_command_or_python(page):
    python = "```python\n" in page.read_text(encoding="utf-8")
    assert python or any(not command.reason for command in commands(page))
