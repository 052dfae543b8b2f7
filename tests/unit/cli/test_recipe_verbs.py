"""Verbs that become recipes: their options and words are the recipe's own, and the shell completes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nvprof_kit._capture.profile import program_name, report_name
from nvprof_kit._capture.recipe_options import recipe_options
from nvprof_kit._cli.verbs.capture import profile_ncu

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
VERBS = {
    "ncu profile": (
        profile_ncu.profile,
        ["ncu/layer.sh", "ncu/kernels.sh", "ncu/top.sh", "ncu/roofline.sh", "ncu/common.bash"],
    ),
}


class Became(Exception):
    """What this process would have been replaced by."""


def became(command: click.Command, *words: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str], str]:
    """The recipe, its command line, and what it calls itself."""

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        assert Path(path).name == argv[0] == "bash"
        raise Became(Path(argv[1]).relative_to(RECIPES).as_posix(), argv[2:], env["NVPROF_KIT_VERB"])

    monkeypatch.setattr(os, "execve", execve)
    done = CliRunner().invoke(command, list(words))
    assert isinstance(done.exception, Became), done.output
    recipe, argv, verb = done.exception.args
    return recipe, argv, verb


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_the_recipes_options(verb: str) -> None:
    command, scripts = VERBS[verb]
    listed = {option.name: option for option in recipe_options(*scripts)}
    given = {param.opts[-1]: param for param in command.params if isinstance(param, click.Option)}
    assert set(given) - {"--roofline"} == set(listed)
    for name, option in listed.items():
        assert given[name].help == option.help and option.help
        assert given[name].is_flag is (option.value == ""), name


@pytest.mark.parametrize("script", sorted(RECIPES.glob("ncu/*.sh")), ids=lambda path: path.name)
def test_a_recipe_takes_every_option_of_its_help(script: Path, tmp_path: Path) -> None:
    """An option that the help has and the recipe's own `option` has not would be taken and forgotten."""
    if script.name == "rank.sh":
        return  # takes none
    name = script.relative_to(RECIPES).as_posix()
    text = script.read_text() + (RECIPES / "ncu" / "common.bash").read_text() * name.startswith("ncu")
    cases = text.replace(" | ", ") ").replace("\n", "\n ")
    for option in recipe_options(name):
        assert f" {option.name.removeprefix('--')})" in cases, option.name


@pytest.mark.parametrize(
    ("verb", "words", "recipe", "argv"),
    [
        (
            "ncu profile",
            ["-l", "model.layers.3", "-p", "backward", "-s", "tensor", "-o", "l3", "--", "x"],
            "ncu/layer.sh",
            ["--layer=model.layers.3", "--phase=backward", "--set=tensor", "--output=l3", "--", "x"],
        ),
        (
            "ncu profile",
            ["-k", "gemm", "-k", "nccl", "--each", "-o", "k", "--", "x"],
            "ncu/kernels.sh",
            ["--kernel=gemm", "--kernel=nccl", "--each", "--output=k", "--", "x"],
        ),
        (
            "ncu profile",
            ["-c", "run.sqlite", "-o", "t", "--", "x"],
            "ncu/top.sh",
            ["--capture=run.sqlite", "--output=t"],
        ),
        (
            "ncu profile",
            ["--roofline", "-l", "a", "-o", "r", "--", "x"],
            "ncu/roofline.sh",
            ["--layer=a", "--output=r"],
        ),
    ],
)
def test_the_recipes_words(
    verb: str, words: list[str], recipe: str, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = became(VERBS[verb][0], *words, monkeypatch=monkeypatch)
    assert found[0] == recipe and found[2] == f"nvprof-kit {verb}"
    assert sorted(found[1]) == sorted(argv if "--" in argv or not words or "--" not in words else [*argv, "--", "x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "x"], "nothing to measure; needed --layer PATH"),
        (["-l", "a", "-k", "b", "--", "x"], "--kernel and --layer exclude each other"),
        (["-k", "b", "--phase", "backward", "--", "x"], "--phase does not go with --kernel"),
    ],
)
def test_what_ncu_cannot_measure_at_once(words: list[str], message: str) -> None:
    done = CliRunner().invoke(profile_ncu.profile, words)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 3", "train"),
        ("torchrun --nproc-per-node 8 ./jobs/pre.train.py", "pre.train"),
        ("python3.11 -u -m package.train", "train"),
        ("python -m package.__main__", "package"),
        ("./serve.sh --port 80", "serve"),
        ("python -c print(1)", "python"),
    ],
)
def test_a_report_is_called_as_its_program(command: str, name: str) -> None:
    assert program_name(command.split()) == name
    then = time.strptime("2026-11-22 22:13:00", "%Y-%m-%d %H:%M:%S")
    assert report_name(command.split(), then) == f"{name}-20261122-221300"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvprof_kit"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "_NVPROF_KIT_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nvprof-kit" in done.stdout and "_NVPROF_KIT_COMPLETE" in done.stdout
