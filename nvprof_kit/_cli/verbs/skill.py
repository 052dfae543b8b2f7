"""``nvprof-kit skill``: the text on which command answers which question."""

from __future__ import annotations

import click


@click.command(short_help="Print the path of SKILL.md, a guide for language models.")
@click.option("--print", "printed", is_flag=True, help="Print the text instead of its path.")
def skill(printed: bool) -> None:
    """Print the path of SKILL.md, a guide for language models: which command answers which question, how to read the
    output, and when to abstain.
    """
    from nvprof_kit._agents.skill import skill_path, skill_text

    click.echo(skill_text() if printed else str(skill_path()), nl=not printed)
