"""What a release is made of: a workflow that nothing but a published release starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    return read


def test_only_a_published_release_uploads() -> None:
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
