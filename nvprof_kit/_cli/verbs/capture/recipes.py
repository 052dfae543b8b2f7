"""``nvprof-kit recipes``: where the shell recipes are."""

from __future__ import annotations

import click


@click.command()
def recipes() -> None:
    """Print the folder of the shell recipes.

    Run one with: bash "$(nvprof-kit recipes)/nsys/profile.sh" python train.py
    """
    from nvprof_kit._capture.recipes import recipes_folder

    click.echo(recipes_folder())
