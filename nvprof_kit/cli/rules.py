"""``--rules``: how the program of a capture names its ranges, from a preset or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit.analysis.rules import Rules


def _load(_context: click.Context, _option: click.Parameter, named: str | None) -> Rules | None:
    """The rules of a preset's name or of a file.

    Raises:
        UsageError: No preset and no file bears the name, or the file is not what it should be.
    """
    if named is None:
        return None
    from nvprof_kit.analysis.rules import parse_rules, preset, presets

    if named in presets():
        return preset(named)
    try:
        text = Path(named).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"--rules {named}: no such file, and no preset; there are {', '.join(presets())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--rules {named}: cannot read it: {error}") from None
    return parse_rules(text, named)


rules_option = click.option(
    "--rules",
    metavar="PRESET|FILE",
    callback=_load,
    help="How the program names its ranges: deepspeed, emit-nvtx, megatron-lm, nemo, sglang, tensorrt-llm, torch-nvtx, "
    "vllm, or a TOML file.",
)
"""Gives a verb ``--rules``; it gets `nvprof_kit.analysis.rules.Rules`, or None."""


def domain_for(domain: str, rules: Rules | None) -> str:
    """The domain to read: what the user named, else what the rules say, else our own."""
    context = click.get_current_context()
    if context.get_parameter_source("domain") is ParameterSource.COMMANDLINE or rules is None or rules.domain is None:
        return domain
    return rules.domain
