"""What a release is made of: the builds' switch, and a workflow that nothing but a published release starts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def hatch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def workflow(name: str) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    return read


def test_a_wheel_without_the_extension(
    hatch_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("NVPROF_KIT_EXTENSION", "auto")
    assert hatch_build.build(tmp_path) is None  # no compiler: Python does its work, and the build says so
    assert "a little slower" in capsys.readouterr().err
    monkeypatch.setenv("NVPROF_KIT_EXTENSION", "required")
    with pytest.raises(SystemExit, match="asks for it"):
        hatch_build.build(tmp_path)
    monkeypatch.setenv("NVPROF_KIT_EXTENSION", "none")
    monkeypatch.delenv("CC")
    assert hatch_build.build(tmp_path) is None
    assert capsys.readouterr().err.count("a little slower") == 1  # of "required"; "none" is what was asked for
    monkeypatch.setenv("NVPROF_KIT_EXTENSION", "maybe")
    with pytest.raises(SystemExit, match="needed one of auto, required, none"):
        hatch_build.build(tmp_path)


def test_only_a_published_release_uploads() -> None:
    release = workflow("release.yml")
    assert release[True] == {"release": {"types": ["published"]}}  # YAML reads the key `on` as a boolean
    publish = release["jobs"]["publish"]
    assert publish["environment"]["name"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"wheels", "rest"}
    uploads = [name for path in WORKFLOWS for name in re.findall("gh-action-pypi-publish", path.read_text("utf-8"))]
    assert len(uploads) == 1
    assert not re.search(r"password:|secrets\.", (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded_and_pinned(path: Path) -> None:
    read = workflow(path.name)
    assert read["permissions"] == {"contents": "read"}
    assert [name for name, job in read["jobs"].items() if "timeout-minutes" not in job] == []
    used = [step["uses"] for job in read["jobs"].values() for step in job["steps"] if "uses" in step]
    assert [action for action in used if not re.search(r"@[0-9a-f]{40}$", action)] == []


def test_templates_for_issues_can_be_filled_in() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert read["name"] and read["description"]
            assert all(field["attributes"]["label"] for field in read["body"])
