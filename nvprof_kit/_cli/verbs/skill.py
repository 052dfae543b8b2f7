"""``nvprof-kit skill``: the skill file."""

from __future__ import annotations

from pathlib import Path

import click

_PATH = Path(__file__).parents[2] / "skill" / "SKILL.md"


@click.command(short_help="Print the path of SKILL.md, a guide for language models.")
@click.option("--print", "printed", is_flag=True, help="Print the text instead of its path.")
def skill(printed: bool) -> None:
    """Print the path of SKILL.md, a guide for language models: which command answers which question, how to read the
    output, and when to abstain.
    """
    click.echo(_PATH.read_text(encoding="utf-8") if printed else str(_PATH), nl=not printed)
