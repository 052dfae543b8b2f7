"""A capture opened as every reading verb does: the domain and the meaning of its ranges from ``--rules``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules
    from nvprof_kit.analysis.kernels.classes import Rule
    from nvprof_kit.trace.schema import Trace


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
    from nvprof_kit.analysis.kernels.classes import parse_rules

    try:
        return parse_rules(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from None


def _load(_context: click.Context, _option: click.Parameter, named: str | None) -> Rules | None:
    """The rules of a preset's name or of a file.

    Raises:
        UsageError: No preset and no file bears the name, or the file is not what it should be.
    """
    if named is None:
        return None
    from nvprof_kit.analysis.foreign.rules import parse_rules, preset, presets

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
"""Gives a verb ``--rules``; it gets `nvprof_kit.analysis.foreign.rules.Rules`, or None."""


def domain_for(domain: str, rules: Rules | None) -> str:
    """The domain to read: what the user named, else what the rules say, else our own."""
    context = click.get_current_context()
    if context.get_parameter_source("domain") is ParameterSource.COMMANDLINE or rules is None or rules.domain is None:
        return domain
    return rules.domain


def opened(capture: str, domain: str, rules: Rules | None, optional: Collection[str]) -> Trace:
    """A capture with its ranges renamed by the rules.

    Args:
        capture: The file.
        domain: The NVTX domain that the user asked for.
        rules: How the captured program names its ranges; None where it follows the contract.
        optional: What to read besides.
    """
    from nvprof_kit.analysis.foreign.translate import translate
    from nvprof_kit.trace.open import open_capture

    return translate(open_capture(capture, domain=domain_for(domain, rules), optional=optional), rules)
