"""The text that tells which command answers which question; it ships in the package."""

from __future__ import annotations

from pathlib import Path


def skill_path() -> Path:
    """Where it is: a folder of its own, as programs that load such texts want it."""
    return Path(__file__).parents[1] / "skill" / "SKILL.md"


def skill_text() -> str:
    """Which command answers which question, how to read the answer, and when to abstain."""
    return skill_path().read_text(encoding="utf-8")
