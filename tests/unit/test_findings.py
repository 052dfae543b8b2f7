"""Findings of whoever examines have one shape, and their rules one list of names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvprof_kit._findings import RULES, Finding, checked

PACKAGE = Path(__file__).parents[2] / "nvprof_kit"
EXAMINE = [*(PACKAGE / "_analysis" / "advise").glob("*.py"), *PACKAGE.rglob("doctor*.py")]


def test_a_rule_without_a_name_in_the_list_is_refused() -> None:
    with pytest.raises(ValueError, match="no rule 'guess'"):
        Finding("guess", "A guess", "")
    with pytest.raises(ValueError, match="severity 'dire'"):
        checked("dire", "kernels", "")


def test_the_list_names_no_rule_that_nobody_looks_for() -> None:
    named = {text for path in EXAMINE for text in re.findall(r'"([^"\n]+)"', path.read_text(encoding="utf-8"))}
    assert set(RULES) - named == set()


def test_there_is_one_class_of_findings() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [path.name for path, page in pages.items() if re.search(r"^class \w*Finding\b", page, re.M)] == [
        "_findings.py"
    ]
