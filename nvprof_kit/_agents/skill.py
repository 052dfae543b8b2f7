"""The skill file: which command answers which question."""

from __future__ import annotations

from pathlib import Path


def skill_path() -> Path:
    """The path of ``SKILL.md`` in the installed package; its folder can be copied to a client's skills folder."""
    return Path(__file__).parents[1] / "skill" / "SKILL.md"


def skill_text() -> str:
    """Which command answers which question, how to read the answer, and when to abstain."""
    return skill_path().read_text(encoding="utf-8")
