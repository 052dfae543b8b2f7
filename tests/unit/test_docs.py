"""The documentation says what the program does: every verb, option and column in it is real, and none is missing."""

import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.data import ROOT

from nvprof_kit._cli import group

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "recipes" / "README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", group.commands)
def test_every_verb_has_help_and_a_page(verb):
    command = group.commands[verb]
    assert command.help and command.get_short_help_str()
    assert all(getattr(option, "help", "") for option in command.params if option.param_type_name == "option")
    assert f"\n<!-- help-{verb} -->\n" in "".join(map(text, PAGES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text(page))
    found = [(page.parent / link, (page.parent / link).with_suffix(".ipynb")) for link in links]  # a notebook is a page
    assert [link for link, ways in zip(links, found, strict=True) if not any(way.exists() for way in ways)] == []


def test_what_development_names_exists():
    """A path in docs/development.md is one of the repository, or of the package, whose folders begin with ``_``."""
    named = re.findall(
        r"`((?:_|docs/|tests/|tools/|recipes/|nvprof_kit/|support/)[\w./*-]*)`", text(ROOT / "docs" / "development.md")
    )
    assert len(named) > 20
    missing = [path for path in named if "/" in path and not any(
        [*(ROOT / folder).glob(path.rstrip("/"))] for folder in (".", "nvprof_kit", "tests"))]  # fmt: skip
    assert missing == []


def test_the_readme_on_pypi_has_no_relative_link():
    """Its links and pictures survive without the repository beside it: the build leads them to the release's tag."""
    hook = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    shown = README
    for substitution in hook["substitutions"]:
        shown = re.sub(substitution["pattern"], substitution["replacement"].replace("$HFPR_VERSION", "1.2.3"), shown)
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 5
    assert [link for link in links if not link.startswith("https://")] == []
    raw = "https://raw.githubusercontent.com/nvprof-kit/nvprof-kit/v1.2.3/docs/images/"
    assert all(picture.startswith(raw) for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", shown))
    assert "<img" not in shown and "<a " not in shown


def test_one_address_of_the_repository():
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    source = project["urls"]["Source"]
    assert set(project["urls"]) == {"Documentation", "Source", "Issues", "Changelog"}
    assert f"repository: {source} " in text(ROOT / "mkdocs.yml")
    assert f'repository-code: "{source}"' in text(ROOT / "CITATION.cff")
    assert f"site_url: {project['urls']['Documentation']}\n" in text(ROOT / "mkdocs.yml")


def test_one_version():
    version = re.search(r'__version__ = "(.*)"', text(ROOT / "nvprof_kit" / "__init__.py"))
    assert version is not None
    assert f"\nversion: {version[1]}\n" in text(ROOT / "CITATION.cff")


def test_nothing_installs_from_pypi_before_it_is_there():
    first = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "tutorial.md"]
    assert [path.name for path in first if re.search(r"pip install \"?nvprof-kit", text(path))] == []


def commands(page: str) -> set[str]:
    """The command lines in a page's code blocks, without comments."""
    blocks = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    return {line.partition("#")[0].strip() for block in blocks for line in block.splitlines()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    for line in commands(text(page)):
        if line.startswith("make "):
            assert line.split()[1] in targets, line
        if line.startswith("nvprof-kit "):
            verb, *words = line.removeprefix("nvprof-kit ").split()
            command = group.commands[verb]
            if isinstance(command, click.Group):
                named = words.pop(0) if words[0] in command.commands or verb != "ranks" else "compare"
                command = command.commands[named]
            known = {name for option in command.params for name in option.opts}
            asked = words[: words.index("--")] if "--" in words else words
            passed_on = {index + 1 for index, word in enumerate(asked) if word == "-x"}
            options = {word for index, word in enumerate(asked) if word.startswith("-") and index not in passed_on}
            assert options <= known, line
        for script in re.findall(r"nvprof-kit recipes\)/(\S+)\"", line):
            assert (ROOT / "recipes" / script).exists(), line


def test_every_recipe_is_documented():
    page = text(ROOT / "docs" / "recipes.md")
    recipes = [path.relative_to(ROOT / "recipes").as_posix() for path in (ROOT / "recipes").rglob("*.sh")]
    assert recipes
    assert [recipe for recipe in recipes if f"## {recipe}" not in page] == []
    assert [recipe for recipe in recipes if f"`{recipe}" not in text(ROOT / "recipes" / "README.md")] == []


def test_every_setting_of_a_recipe_is_explained():
    page = text(ROOT / "docs" / "recipes.md")
    preset = text(ROOT / "recipes" / "nsys" / "presets" / "train")
    settings = [line for line in preset.splitlines() if line.startswith("--")]
    assert len(settings) > 3
    assert [setting for setting in settings if setting not in page] == []


def test_the_python_in_the_readme_is_python():
    for block in re.findall(r"^ *```python\n(.*?)^ *```", "".join(map(text, PAGES)), re.DOTALL | re.MULTILINE):
        compile(dedent(block), "<page>", "exec")


def test_the_readme_shows_what_its_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    printed = CliRunner().invoke(group, ["layers", "tests/data/llama-2023.4.sqlite.xz"]).stdout
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- table:begin -->\n```\n")[1].split("\n```")[0]
    assert shown == printed.replace("tests/data/", "").rstrip()


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def test_only_a_published_release_uploads():
    release = workflow("release.yml")
    assert release[True] == {"release": {"types": ["published"]}}  # YAML reads the key `on` as a boolean
    publish = release["jobs"]["publish"]
    assert publish["environment"]["name"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"build"}
    uploads = [name for path in WORKFLOWS for name in re.findall("gh-action-pypi-publish", path.read_text("utf-8"))]
    assert len(uploads) == 1
    assert not re.search(r"password:|secrets\.", (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded_and_pinned(path):
    read = workflow(path.name)
    assert read["permissions"] == {"contents": "read"}
    assert [name for name, job in read["jobs"].items() if "timeout-minutes" not in job] == []
    used = [step["uses"] for job in read["jobs"].values() for step in job["steps"] if "uses" in step]
    assert [action for action in used if not re.search(r"@[0-9a-f]{40}$", action)] == []
