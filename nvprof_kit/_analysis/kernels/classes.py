"""The class of each GPU operation (gemm, attention, norm, …), derived from its name by a list of rules.

The rules are data (`classes.toml`, in the package); user rules have the same form and take precedence. Operations that
no rule matches are `other` and listed, so that missing rules are visible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import Bools, begins, exact_sums
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.joins import distinct
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue, shortened

if TYPE_CHECKING:
    import pandas as pd

CLASSES: Mapping[str, str] = read_toml("nvprof_kit._analysis.kernels", "classes.toml")["classes"]
"""The classes and their descriptions; an operation's class is an index into the keys."""

UNMATCHED = "(matched nothing)"
"""Family of an operation that no rule matched."""

_CODE = {name: code for code, name in enumerate(CLASSES)}
_BY_KIND = {"memcpy": ("copy", "memcpy"), "memset": ("copy", "memset"), "graph": ("other", "whole CUDA graph")}
_FIELDS = {"name", "class", "match", "example"}


class Rule(NamedTuple):
    """One rule: its name, class, pattern, and example names that it must match; and whether the pattern is one of names
    in lower case, which are searched in half the time.
    """

    name: str
    kernel_class: str
    match: re.Pattern[str]
    example: tuple[str, ...] = ()
    in_lower_case: bool = False


class Family(NamedTuple):
    """The family of a kernel name: its class, and the rule's name or `UNMATCHED`."""

    kernel_class: str
    name: str


@dataclass(frozen=True)
class KernelClasses:
    """The class of every operation (shape ``(n,)``, in the order of `Trace.ops`).

    Attributes:
        code: Index into the keys of `CLASSES`.
        family: Index into `families`.
        families: The matched families: class and rule name.
        unmatched: Kernels that no rule matched, by descending GPU time: name, count, gpu_ns.
        total_ns: The time of all operations.
    """

    code: npt.NDArray[np.int8]
    family: npt.NDArray[np.int32]
    families: tuple[Family, ...]
    unmatched: pd.DataFrame
    total_ns: int

    def is_a(self, kernel_class: str) -> Bools:
        """Which operations have a class, shape ``(n,)``."""
        matches: Bools = self.code == _CODE[kernel_class]
        return matches

    def warnings(self) -> tuple[Issue, ...]:
        """An issue about kernels that no rule matched, if there are any."""
        if not len(self.unmatched):
            return ()
        share = int(self.unmatched["gpu_ns"].sum()) / max(self.total_ns, 1)
        facts = {"percent": 100 * share, "costliest": shortened(str(self.unmatched["name"].iloc[0]))}
        return (Issue.of("unmatched-kernels", share, count=len(self.unmatched), **facts),)


_NEEDS_CASE = re.compile(r"\\[A-Zux\d]|\(\?(?:[a-z]*-|P)|[A-Z]-[^A-Z]|[^A-Z]-[A-Z]|\[[^]]*[^a-zA-Z]-[^]a-zA-Z0-9]")
"""Patterns with these mean something else in lower case."""


def rule_of(table: Mapping[str, Any], where: str) -> Rule:
    """A rule from a table ``kernel`` in TOML, with ``name``, ``class`` and ``match``.

    Args:
        table: The table.
        where: Name of its place in error messages.

    Raises:
        UsageError: A field is missing or unknown, the class is not in `CLASSES`, or a pattern is not a regular
            expression.
    """
    if missing := _FIELDS - {"example"} - table.keys():
        raise UsageError(f"{where}: lacks {', '.join(sorted(missing))}")
    if unknown := table.keys() - _FIELDS:
        raise UsageError(f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(_FIELDS))}")
    if table["class"] not in list(CLASSES):
        raise UsageError(f"{where}: no class {table['class']!r}; needed one of {', '.join(CLASSES)}")
    match, example = (_texts(table, key, where) for key in ("match", "example"))
    text = "|".join(match)
    in_lower_case = text.isascii() and not _NEEDS_CASE.search(text)
    try:
        pattern = re.compile(text.lower()) if in_lower_case else re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"{where}: {table['match']!r} is not a regular expression: {error}") from None
    return Rule(str(table["name"]), table["class"], pattern, example, in_lower_case)


def _texts(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A string or a list of strings of a rule; empty if the key is missing."""
    value = table.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or (key in table and not texts):
        raise UsageError(f"{where}: {key} = {value!r}; needed a text in quotes or a list of them")
    return tuple(texts)


@lru_cache(maxsize=2)
def built_in_rules(to_last: str = "") -> tuple[Rule, ...]:
    """The built-in rules, or only those up to the last of a class."""
    tables = list(read_toml("nvprof_kit._analysis.kernels", "classes.toml")["kernel"])
    while to_last not in ("", tables[-1]["class"]):
        del tables[-1]
    return tuple(rule_of(table, "classes.toml") for table in tables)


_LONGEST = 8192
"""Limit on the matched characters at the start and end of a name: some patterns take quadratic time."""


def family_of(name: str, kind: str = "kernel", own_rules: Sequence[Rule] = (), to_last: str = "") -> Family:
    """The class of one operation and the rule that matched.

    Args:
        name: The kernel's demangled or short name, or a CPU operator's name.
        kind: One of `nvprof_kit._trace.schema.OP_KINDS`; copies and whole graphs need no rule.
        own_rules: The user's rules, tried before the built-in ones.
        to_last: A class, if only it matters: no built-in rule behind its last is tried.
    """
    if kind in _BY_KIND:
        return Family(*_BY_KIND[kind])
    shortened = name if len(name) <= _LONGEST else name[: _LONGEST // 2] + name[-_LONGEST // 2 :]
    lowered = shortened.lower()
    for rule in (*own_rules, *built_in_rules(to_last)):
        if rule.match.search(lowered if rule.in_lower_case else shortened):
            return Family(rule.kernel_class, rule.name)
    return Family("other", UNMATCHED)


def classify(ops: pd.DataFrame, own_rules: Sequence[Rule] = ()) -> KernelClasses:
    """The class of every operation of a capture. Each distinct name is matched once.

    Args:
        ops: The operations, with the optional column ``name``.
        own_rules: The user's rules, tried before the built-in ones.
    """
    import pandas as pd

    names = ops["name"].cat
    count = len(OP_KINDS)
    kind = ops["kind"].to_numpy()
    pair, pair_of_op = distinct(names.codes.to_numpy().astype(np.int64) * count + kind)
    named = ((str(names.categories[code // count]), OP_KINDS[code % count]) for code in pair.tolist())
    matched = [family_of(name, kind_of_name, own_rules) for name, kind_of_name in named]
    families = tuple(dict.fromkeys(matched))
    family_number = {family: number for number, family in enumerate(families)}
    code_of_pair = np.array([_CODE[family.kernel_class] for family in matched], dtype=np.int8)
    family_of_pair = np.array([family_number[family] for family in matched], dtype=np.int32)
    gpu_ns = exact_sums(pair_of_op, (ops["end_ns"] - ops["start_ns"]).to_numpy(), len(pair))
    unmatched = pd.DataFrame(
        {
            "name": [str(names.categories[code // count]) for code in pair.tolist()],
            "count": np.bincount(pair_of_op[begins(ops)], minlength=len(pair)),
            "gpu_ns": gpu_ns,
        }
    )[np.array([family.name == UNMATCHED for family in matched], dtype=bool)]
    return KernelClasses(
        code=code_of_pair[pair_of_op],
        family=family_of_pair[pair_of_op],
        families=families,
        unmatched=unmatched.sort_values("gpu_ns", ascending=False, kind="stable", ignore_index=True),
        total_ns=int(gpu_ns.sum()),
    )


def is_comm(ops: pd.DataFrame, own_rules: Sequence[Rule] = ()) -> Bools:
    """Which operations `classify` gives the class ``comm``, shape ``(n,)``; the other classes take ten times as long.

    Args:
        ops: The operations, with the optional column ``name``.
        own_rules: The user's rules, tried before the built-in ones.
    """
    names = ops["name"].cat
    families = [family_of(str(name), own_rules=own_rules, to_last="comm") for name in names.categories]
    of_name = np.array([family.kernel_class == "comm" for family in families], dtype=bool)
    of_kind = np.array([kind not in _BY_KIND for kind in OP_KINDS])
    matches: Bools = of_name[names.codes.to_numpy()] & of_kind[ops["kind"].to_numpy()]
    return matches
