"""How a module path and a phase become the text of an NVTX range, and back.

The code that instruments a program and the code that reads its capture share only this file and the capture. It
imports nothing else of the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

DOMAIN = "nvprof_kit"
"""NVTX domain of all ranges that the package emits."""

NO_LAYER = "(none)"
"""Layer of an operation launched outside all layer ranges."""

NO_PHASE = "other"
"""Phase of an operation launched outside all layer and phase ranges."""

WINDOW = "window"
"""Text of the range around the steps that a schedule records. nsys (``--capture-range=nvtx``) and ncu can capture it.
"""

MEMORY_BEGIN, MEMORY_END, MEMORY_PEAK = "allocated at begin", "allocated at end", "peak inside"
"""Texts of the marks of category ``memory`` inside a layer's range; the payload is a number of bytes."""

GARBAGE = "gc"
"""Text of the ranges of category ``user`` around Python's full garbage collections."""

COUNTING = "count_flops"
"""Text of the range of category ``user`` around what `count_flops` counts, which takes longer by that."""

RANK_MARK = "NVPROF_KIT_RANK_MARK"
"""Environment variable; with the value ``step``, the `rank_text` is marked in each step instead of once."""

PEAKS_FILE = "gpu_peaks.json"
"""Name of the file of measured peaks, in the folder of the captures."""

FLOPS_FORMAT, FLOPS_VERSION = "nvprof_kit flops", 3
"""Format of the files of counted operations, and its version."""

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts that DDP, torch.compile, FSDP and activation checkpointing insert into module paths.
"""


class Category(str, Enum):
    """NVTX category of a range; the value is the name registered with ``nvtxNameCategory``."""

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
"""Categories of layer ranges."""

LAYER_PHASES = tuple(category.value for category in LAYER_CATEGORIES)
"""Their values: the phases of a layer in all tables."""

PHASE_CATEGORIES = (Category.PHASE, Category.OPTIMIZER, Category.DATA)
"""Categories of phases of the training or decoding loop."""

_PHASE = re.compile("forward|backward|optimizer|data|dataloader|generate|prefill|decode|eval|loss|zero_grad|capture")
"""Texts, in lower case, that mean a phase if a range has no category."""

_STEP = re.compile(r"(?:step|iteration|iter|ProfilerStep)[ _#:]*(-?\d{1,18})", re.IGNORECASE)  # fits in int64
_RANK = re.compile(r"rank (\d{1,9})(?: of (\d{1,9}))?(?: run (\S+))?")
_GROUP_TOKEN = re.compile(r"(\d{1,9})(?:-(\d{1,9})|:(\d{1,9}):(\d{1,9}))?")
_MOST_TEXT, _MOST_TOKENS, _MOST_RANKS = 4_000, 64, 1 << 18
_INDEX = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class RangeName(NamedTuple):
    """A parsed range: the module path, phase or step text, and the category."""

    text: str
    category: Category


def encodable(text: str) -> str:
    """Make a text encodable as UTF-8: a lone surrogate becomes a character reference (``&#55296;``)."""
    return text if text.isascii() else text.encode("utf-8", "xmlcharrefreplace").decode("utf-8")


def strip_wrappers(path: str) -> str:
    """Drop wrapper parts from a module path: ``module.layers.0._orig_mod.mlp`` becomes ``layers.0.mlp``.

    The result is `encodable`.
    """
    return encodable(".".join(name for name in path.split(".") if name not in WRAPPER_PARTS))


def layer_index(path: str) -> int:
    """The first integer part of a module path, or -1: 3 for ``model.layers.3.self_attn``."""
    match = _INDEX.search(path)
    return int(match.group(1)) if match else -1


def range_text(path: str, category: Category) -> str:
    """The text of a range: the path, followed by the phase for backward and recompute.

    The phase is in the text because ncu's CSV has no category.
    """
    return f"{path} {category.value}" if category in (Category.BACKWARD, Category.RECOMPUTE) else path


def step_number(text: str) -> int | None:
    """The step number in a range text (``step 12``, ``ProfilerStep#12``), or None if the text does not name a step."""
    match = _STEP.fullmatch(text)
    return int(match.group(1)) if match else None


class RankName(NamedTuple):
    """The process of a job that wrote a capture; None where unknown."""

    rank: int
    world: int | None = None
    run: str | None = None


def rank_text(name: RankName) -> str:
    """The text of the mark that identifies a process: ``rank 3 of 8 run 4711``."""
    world = "" if name.world is None else f" of {name.world}"
    run = "_".join((name.run or "").split())
    return f"rank {name.rank}{world}{run and ' run '}{run}"


def parse_rank(text: str) -> RankName | None:
    """The process in the text of a mark of category ``user``, or None if the mark has another meaning."""
    match = _RANK.fullmatch(text)
    if match is None:
        return None
    rank, world, run = match.groups()
    return RankName(int(rank), None if world is None else int(world), run)


class GroupName(NamedTuple):
    """A process group of torch.distributed: its name, its description ('' if it has none) and its ranks in the job."""

    name: str
    description: str
    ranks: tuple[int, ...]


def groups_text(groups: Sequence[GroupName]) -> str:
    """The text of the mark that lists the groups of a process: ``groups 0 default_pg 0-3; 1 mesh_tp 0:3:2``.

    It has at most 4,000 characters. Groups that do not fit, or whose ranks are too irregular, are left out; without any
    group it is ''.
    """
    text = ""
    for group in groups:
        ranks = _ranks_text(group.ranks)
        name, description = (re.sub(r"[\s;]+", "_", encodable(label)).lstrip("-")[:100] or "-" for label in group[:2])
        more = f"{text}; {name} {description} {ranks}" if text else f"groups {name} {description} {ranks}"
        if ranks and len(more) <= _MOST_TEXT:
            text = more
    return text


def parse_groups(text: str) -> list[GroupName]:
    """The groups in the text of a mark of category ``user``; none if the mark has another meaning or is damaged."""
    if not text.startswith("groups ") or len(text) > _MOST_TEXT:
        return []
    groups = []
    for group in text.removeprefix("groups ").split("; "):
        name, _, fields = group.partition(" ")
        description, _, ranks_text = fields.partition(" ")
        ranks = _parse_ranks(ranks_text)
        if not name or not description or not ranks:
            return []
        groups.append(GroupName(name.removeprefix("-"), description.removeprefix("-"), ranks))
    return groups


def _ranks_text(ranks: Sequence[int]) -> str:
    """Sorted ranks: ``0-9999``, ``0:62:2`` (first, last and step) or ``0-1,4-5``; '' if they are too irregular."""
    parts: list[str] = []
    start = 0
    while start < len(ranks) and len(parts) <= _MOST_TOKENS:
        end = start + 1
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == ranks[start + 1] - ranks[start]:
            end += 1
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        if end >= len(ranks) or (step != 1 and end - start < 2):
            parts.append(str(ranks[start]))
            start += 1
        else:
            first, last = ranks[start], ranks[end]
            parts.append(f"{first}-{last}" if step == 1 else f"{first}:{last}:{step}")
            start = end + 1
    return ",".join(parts) if len(parts) <= _MOST_TOKENS else ""


@lru_cache(maxsize=64)  # all ranks of a job list its largest groups
def _parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks in a text of `_ranks_text`; none if it is none."""
    ranks: list[int] = []
    for token in text.split(","):
        match = _GROUP_TOKEN.fullmatch(token)
        if match is None or (match[4] and not int(match[4])):
            return ()
        last = match[2] or match[3] or match[1]
        more = range(int(match[1]), int(last) + 1, int(match[4] or 1))
        if len(ranks) + len(more) > _MOST_RANKS:
            return ()
        ranks += more
    return tuple(ranks)


def parse_range(text: str, category: str | None = None) -> RangeName:
    """Classify a range by its category, or by its text if it has none.

    Args:
        text: The range's text as captured.
        category: The name of its NVTX category; None if it has none or a foreign one.

    Returns:
        The text without the phase suffix, and the category. A text without a category is a step (``step 3``), a phase
        (one of `_PHASE`), or else a layer, with the phase of its suffix or forward without a suffix. An empty
        text is neither a layer nor a phase.
    """
    own_category = Category(category) if category in Category._value2member_map_ else None
    if not text and (own_category is None or own_category in (*LAYER_CATEGORIES, *PHASE_CATEGORIES)):
        return RangeName(text, Category.USER)
    if own_category is not None:
        return RangeName(_without_suffix(text, own_category), own_category)
    if step_number(text) is not None:
        return RangeName(text, Category.STEP)
    if _PHASE.fullmatch(text.lower()):
        return RangeName(text, Category.PHASE)
    for suffix in (Category.BACKWARD, Category.RECOMPUTE):
        if _without_suffix(text, suffix) != text:
            return RangeName(_without_suffix(text, suffix), suffix)
    return RangeName(text, Category.FORWARD)


def _without_suffix(text: str, category: Category) -> str:
    """The path in the text of a backward or recompute range; other texts unchanged."""
    if category not in (Category.BACKWARD, Category.RECOMPUTE):
        return text
    return text.removesuffix(f" {category.value}") or text


def kineto_name(text: str, category: Category) -> str:
    """The name of a range in a Kineto trace, which has no domains or categories: ``nvprof_kit:forward:layers.0``."""
    return f"{DOMAIN}:{category.value}:{text}"


def parse_kineto_name(name: str) -> tuple[str, str] | None:
    """Text and category name of a Kineto annotation of this package, or None for any other annotation."""
    domain, _, marked = name.partition(":")
    category, _, text = marked.partition(":")
    return (text, category) if domain == DOMAIN and category in Category._value2member_map_ else None


MEMORY_SPANS = "nvprof_kit_stretches"
"""Key that `memory_snapshot` adds to PyTorch's snapshot: a list of ``(µs since 1970, label)`` pairs, one per begin and
end of a step or phase. The label applies to later allocations of threads without a label of their own.
"""


def memory_label(name: str, step: int | None) -> str:
    """The label of an allocation: the `kineto_name` of the enclosing range and, inside a step, the step number."""
    return name if step is None else f"{name};step={step}"


def parse_memory_label(label: str) -> tuple[str, int | None]:
    """Name and step of an allocation's label."""
    name, separator, number = label.rpartition(";step=")
    return (name, int(number)) if separator and number.lstrip("-").isdecimal() else (label, None)
