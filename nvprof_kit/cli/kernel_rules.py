"""``--kernel-rules``: a user's own rules for the classes of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit.analysis.kernel_classes import Rule

kernel_rules = click.option(
    "--kernel-rules",
    "rules_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file with rules for kernel classes, asked before the built-in ones.",
)


def read_kernel_rules(path: Path | None) -> tuple[Rule, ...]:
    """The rules of a file, none without a file.

    Raises:
        UsageError: The file cannot be read, or a rule in it is wrong.
    """
    if path is None:
        return ()
    from nvprof_kit.analysis.kernel_classes import parse_rules

    try:
        return parse_rules(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
