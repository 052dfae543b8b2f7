"""The contract of the two halves: how a module and a phase become a range's text, and back.

What instruments a program and what reads its capture share nothing but this file and the capture. It imports nothing.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

DOMAIN = "nvprof_kit"
"""NVTX domain of every range the package emits."""

NO_LAYER = "(none)"
"""Layer of an operation that no layer's range holds."""

NO_PHASE = "other"
"""Phase of an operation that neither a layer's nor a phase's range holds."""

WINDOW = "window"
"""Text of the range around the steps that a schedule records, by which nsys and ncu can be told to capture them."""

MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK = "allocated at begin", "allocated at end", "peak inside"
"""Texts of the marks of category ``memory`` that a layer's range may hold; the payload of each is a number of bytes."""

GARBAGE = "gc"
"""Text of the ranges of category ``user`` around Python's full garbage collections."""

RANK_MARK = "NVPROF_KIT_RANK_MARK"
"""Variable of the environment: where it is ``step``, the `rank_text` is marked in every step and not only once."""

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a module path that wrappers (DDP, torch.compile, FSDP, activation checkpointing) put in and the user
never wrote.
"""


class Category(str, Enum):
    """NVTX category of a range; the value is the name registered with NVTX."""

    STEP = "step"
    PHASE = "phase"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    DATA = "data"
    COMM = "comm"
    MEMORY = "memory"
    USER = "user"


LAYER_CATEGORIES = (Category.FORWARD, Category.BACKWARD, Category.RECOMPUTE)
"""Categories whose ranges are a layer's; their values are the layer phases of every table."""

PHASE_CATEGORIES = (Category.PHASE, Category.OPTIMIZER, Category.DATA)
"""Categories whose ranges are a stretch of the loop."""

KNOWN_PHASES = frozenset(
    {
        "forward",
        "backward",
        "optimizer",
        "data",
        "dataloader",
        "generate",
        "prefill",
        "decode",
        "eval",
        "loss",
        "zero_grad",
        "capture",
    }
)
"""Texts taken for a phase where a range bears no category."""

_STEP = re.compile(r"(?:step|iteration|iter|ProfilerStep)[ _#:]*(-?\d{1,18})", re.IGNORECASE)  # what fits 64 bits
_RANK = re.compile(r"rank (\d{1,9})(?: of (\d{1,9}))?(?: run (\S+))?")
_INDEX = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class RangeName(NamedTuple):
    """What a range's text and category say: the path, phase or step text, and the category it was taken for."""

    text: str
    category: Category


def encodable(text: str) -> str:
    """A text as it can be written: a lone surrogate, which no tool takes, becomes a number (``&#55296;``)."""
    return text if text.isascii() else text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")


def strip_wrappers(path: str) -> str:
    """Drop the parts of a module path that wrappers put in: ``module.layers.0._orig_mod.mlp`` becomes
    ``layers.0.mlp``. What cannot be written becomes what can (`encodable`).
    """
    return encodable(".".join(part for part in path.split(".") if part not in WRAPPER_PARTS))


def layer_index(path: str) -> int:
    """The first whole number among the parts of a module path, or -1: ``model.layers.3.self_attn`` gives 3."""
    found = _INDEX.search(path)
    return int(found.group(1)) if found else -1


def range_text(path: str, category: Category) -> str:
    """The text of a range: the path, and for backward and recompute the phase behind it, since ncu's CSV has no
    category.
    """
    return f"{path} {category.value}" if category in (Category.BACKWARD, Category.RECOMPUTE) else path


def step_number(text: str) -> int | None:
    """The number in the text of a step's range (``step 12``, ``ProfilerStep#12``), or None where the text is no
    step's.
    """
    found = _STEP.fullmatch(text)
    return int(found.group(1)) if found else None


class RankName(NamedTuple):
    """Which process of a job a capture is of; None for what nobody told."""

    rank: int
    world: int | None = None
    run: str | None = None


def rank_text(name: RankName) -> str:
    """The text of the mark by which a process says who it is: ``rank 3 of 8 run 4711``."""
    world = "" if name.world is None else f" of {name.world}"
    run = "_".join((name.run or "").split())
    return f"rank {name.rank}{world}{run and ' run '}{run}"


def parse_rank(text: str) -> RankName | None:
    """Who says so in the text of a mark of category ``user``, None where it is another mark's."""
    found = _RANK.fullmatch(text)
    if found is None:
        return None
    rank, world, run = found.groups()
    return RankName(int(rank), None if world is None else int(world), run)


def parse_range(text: str, category: str | None = None) -> RangeName:
    """What a range is, from its category where there is one, else from its text.

    Args:
        text: The range's text as captured.
        category: The name of its NVTX category, None where it has none or one that is not ours.

    Returns:
        The text without the phase's suffix, and the category. A text without a category is a step (``step 3``), a
        phase (one of `KNOWN_PHASES`), or else a layer: of the phase in its suffix, of forward where it has none.
        An empty text is neither layer nor phase.
    """
    known = Category(category) if category in Category._value2member_map_ else None
    if not text and (known is None or known in (*LAYER_CATEGORIES, *PHASE_CATEGORIES)):
        return RangeName(text, Category.USER)
    if known is not None:
        return RangeName(_without_suffix(text, known), known)
    if step_number(text) is not None:
        return RangeName(text, Category.STEP)
    if text.lower() in KNOWN_PHASES:
        return RangeName(text, Category.PHASE)
    for suffix in (Category.BACKWARD, Category.RECOMPUTE):
        if _without_suffix(text, suffix) != text:
            return RangeName(_without_suffix(text, suffix), suffix)
    return RangeName(text, Category.FORWARD)


def _without_suffix(text: str, category: Category) -> str:
    """The path in the text of a backward or recompute range; other texts as they are."""
    if category not in (Category.BACKWARD, Category.RECOMPUTE):
        return text
    return text.removesuffix(f" {category.value}") or text


def kineto_name(text: str, category: Category) -> str:
    """The name of one of our ranges in a Kineto trace, which knows neither domains nor categories:
    ``nvprof_kit:forward:layers.0``.
    """
    return f"{DOMAIN}:{category.value}:{text}"


def parse_kineto_name(name: str) -> tuple[str, str] | None:
    """Text and category name of a Kineto annotation that is ours, None of any other."""
    domain, _, rest = name.partition(":")
    category, _, text = rest.partition(":")
    return (text, category) if domain == DOMAIN and category in Category._value2member_map_ else None


MEMORY_STRETCHES = "nvprof_kit_stretches"
"""Key under which `memory_snapshot` adds to PyTorch's snapshot when steps and phases began and ended, a list of pairs:
µs since 1970, and the label of what is allocated from then on by a thread that bears none.
"""


def memory_label(name: str, step: int | None) -> str:
    """What an allocation is labelled with: the `kineto_name` of the range it happened in, and the step, if any."""
    return name if step is None else f"{name};step={step}"


def parse_memory_label(label: str) -> tuple[str, int | None]:
    """Name and step of an allocation's label."""
    name, found, number = label.rpartition(";step=")
    return (name, int(number)) if found and number.lstrip("-").isdecimal() else (label, None)
