"""The command line's edges: help, version, exit codes, one line per error."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click
import pytest
from support.captures.nsys_file import NsysFile
from support.cli import NVPROF_KIT, execute, run

import nvprof_kit
from nvprof_kit._cli import group
from nvprof_kit._cli.verb import READ
from nvprof_kit.errors import CaptureError, ToolError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nvprof_kit._result.result import RowOptions


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"nvprof-kit {nvprof_kit.__version__}\n"


def test_no_verb_at_all_shows_the_help(capsys):
    assert run() == 2
    assert "Read:" in capsys.readouterr().err


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path


@pytest.mark.parametrize("path", [*leaves(group)], ids=" ".join)
def test_every_verb_has_an_example_that_it_understands(path, capsys):
    assert run(*path, "--help") == 0
    _, _, example = capsys.readouterr().out.partition("  Example:\n")
    words = shlex.split(example)
    if "nvprof-kit" not in words:  # of a verb that prints a path
        assert f"$(nvprof-kit {' '.join(path)})" in words[-1]
        return
    words = words[words.index("nvprof-kit") + 1 :]
    command: click.Command = group
    while isinstance(command, click.Group):
        name = words.pop(0) if words[0] in command.commands else "compare"
        command = command.commands[name]
    assert command is not group and command.name == path[-1]
    command.make_context(path[-1], words)


@pytest.mark.parametrize(("words", "verb"), [("layer", ""), ("layers", " layers"), ("layers a --by hour", " layers")])
def test_a_wrong_call_is_one_line(words, verb, capsys):
    assert run(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()  # click's wording differs a little from release to release
    assert line.startswith("nvprof-kit: ") and line.endswith(f" (see nvprof-kit{verb} --help)")


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (CaptureError("a.sqlite: empty"), 2, "nvprof-kit: a.sqlite: empty"),
        (UsageError("two\nlines"), 2, "nvprof-kit: two lines"),
        (ToolError("no nsys"), 3, "nvprof-kit: no nsys"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(raised, status, line, monkeypatch, capsys):
    def fail() -> None:
        raise raised

    monkeypatch.setitem(group.commands, "fail", click.Command("fail", callback=fail))
    assert run("fail") == status
    assert capsys.readouterr().err.strip() == line


def test_a_defect_is_one_line_that_names_its_traceback(monkeypatch, capsys, tmp_path):
    def fail() -> None:
        raise ZeroDivisionError("\x1b[31mnothing\nat all")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(group.commands, "fail", click.Command("fail", callback=fail))
    assert run("fail") == os.EX_SOFTWARE
    (line,) = capsys.readouterr().err.splitlines()
    (kept,) = tmp_path.iterdir()
    assert "ZeroDivisionError: \ufffd[31mnothing at all" in line
    assert line.endswith(str(kept)) and "raise ZeroDivisionError" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


INTERRUPTED = """
import importlib.abc, os, signal, sys
module = sys.argv[1]
class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
from nvprof_kit.__main__ import main
sys.argv[1:] = ["layers", "nothing.sqlite"]
main()
"""


@pytest.mark.parametrize("module", ["click", "nvprof_kit._cli.verbs.reading", "nvprof_kit._api.capture"])
def test_ctrl_c_while_modules_are_imported_ends_quietly(module):
    done = execute(sys.executable, "-c", INTERRUPTED, module)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_an_interrupt_that_is_ignored_stays_ignored():
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED
    done = execute(sys.executable, "-c", ignoring, "click")
    assert done.returncode == 2 and "nothing.sqlite" in done.stderr


def deepest(
    self: nvprof_kit.Capture, *, level: Literal["block", "part"] = "part", **rows: Unpack[RowOptions]
) -> nvprof_kit.Layers:
    """The deepest layers of a capture.

    Args:
        level: How deep.
        rows: Which rows to print and write.
    """
    return self.layers(depth=1 if level == "block" else None, **rows)


def test_a_new_verb_is_one_entry(monkeypatch, file, tmp_path, capsys):
    """Its name, place in the help, options, formats and example come from the declaration and the method alone."""
    monkeypatch.setattr(group, "commands", dict(group.commands))
    monkeypatch.setattr(READ, "commands", [*READ.commands])
    READ.question(deepest, "nvprof-kit deepest run.sqlite --level block")(deepest)
    assert run("--help") == 0
    assert "  deepest    The deepest layers of a capture." in capsys.readouterr().out
    assert run("deepest", "--help") == 0
    text = capsys.readouterr().out
    assert "Example:\n    nvprof-kit deepest run.sqlite --level block" in text
    assert re.search(r"--level \[block\|part\] +How deep\.", text) and "--where GLOB" in text and "--rules" in text
    for layer in ("layers.0", "layers.0.mlp"):
        file.range_(layer, 100, 200, category="forward")
    file.kernel(300, 330, launched=(110, 115))
    capture = str(file.write())
    assert run("deepest", capture, "--where", "*.mlp", "-o", str(tmp_path / "run.csv")) == 0
    assert (tmp_path / "run.csv").read_text().splitlines()[1].startswith("layers.0.mlp,forward,")
    assert run("deepest", capture, "--level", "seam") == 2


def test_on_a_terminal_it_shows_on_stderr_and_the_answer_stays_clean(tmp_path):
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
    assert done.stdout == b"" and ("attributing" in shown or "reading" in shown or "writing" in shown)
    assert "\x1b[2K" in shown  # the line is taken away again


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 8 ./jobs/pre.train.py", "pre.train"),
        ("python3.11 -u -m package.train", "train"),
        ("python -m package.__main__", "package"),
        ("./serve.sh --port 80", "serve"),
        ("python -c print(1)", "python"),
    ],
)
def test_a_report_is_called_as_its_program(command, name, capsys):
    assert run("profile", "-n", "--", *command.split()) == 0
    assert re.search(rf"--output={re.escape(name)}-\d{{8}}-\d{{6}} ", capsys.readouterr().out)


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_has_its_script(shell):
    assert "_NVPROF_KIT_COMPLETE" in execute(*NVPROF_KIT, _NVPROF_KIT_COMPLETE=f"{shell}_source").stdout
