"""The options of every reading verb that say what a capture's ranges and kernels mean."""

from __future__ import annotations

from pathlib import Path

import click

kernel_rules = click.option(
    "--kernel-rules",
    "rules_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file with rules for kernel classes, asked before the built-in ones.",
)

rules_option = click.option(
    "--rules",
    metavar="PRESET|FILE",
    help="How the program names its ranges: deepspeed, emit-nvtx, megatron-lm, nemo, sglang, tensorrt-llm, torch-nvtx, "
    "vllm, or a TOML file.",
)
"""Gives a verb ``--rules``, the name of a preset or of a file."""
