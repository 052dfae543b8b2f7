"""How another program names its ranges: rules that turn a range's text into a layer, a phase, a step or an operator.

Rules are written as TOML, in a file of the user's or as one of the presets beside this module; ``docs/foreign.md``
describes them. Here is no reading of files: a document goes in, `Rules` come out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvprof_kit.errors import UsageError
from nvprof_kit.names import LAYER_CATEGORIES, Category, RangeName, parse_range

FORWARD_OPERATOR, BACKWARD_OPERATOR = "forward", "backward"
"""The two kinds of autograd's operators: what runs in forward, and the node that runs its derivative."""

_LAYER_PHASES = tuple(category.value for category in LAYER_CATEGORIES)
_KEYS = frozenset({"text", "category", "layer", "phase", "step", "operator"})
_HEAD = frozenset({"title", "sources", "domain", "include", "otherwise", "range"})
_OTHERWISE = ("nothing", "layer")


class Meaning(NamedTuple):
    """What a range is.

    Attributes:
        name: Its path, phase or step, and its category. A path that begins with a dot continues that of the layer
            around the range.
        operator: `FORWARD_OPERATOR`, `BACKWARD_OPERATOR`, or '' for what is no operator of autograd's.
        sequence: The operator's sequence number, -1 where it has none.
        ruled: Whether a rule said so.
    """

    name: RangeName
    operator: str = ""
    sequence: int = -1
    ruled: bool = True


@dataclass(frozen=True)
class Rule:
    """One rule. The templates name groups of the regular expression, ``layers.{number}``.

    Attributes:
        text: What the whole text of a range must match.
        category: What the whole name of its category must match, None where it does not matter.
        layer, phase, step: Templates; None for what the rule does not give.
        operator: `FORWARD_OPERATOR`, `BACKWARD_OPERATOR` or ''.
    """

    text: re.Pattern[str]
    category: re.Pattern[str] | None = None
    layer: str | None = None
    phase: str | None = None
    step: str | None = None
    operator: str = ""

    def meaning(self, text: str, category: str | None) -> Meaning | None:
        """What a range is by this rule, None where the rule is not for it."""
        found = self.text.fullmatch(text)
        if not found or (self.category is not None and not self.category.fullmatch(category or "")):
            return None
        groups = {name: value or "" for name, value in found.groupdict().items()}
        layer, phase, step = (
            None if template is None else template.format_map(groups)
            for template in (self.layer, self.phase, self.step)
        )
        if self.operator:
            sequence = groups.get("sequence", "")
            name = RangeName(layer if layer is not None else text, Category.USER)
            return Meaning(name, self.operator, int(sequence) if sequence else -1)
        if step is not None:
            return Meaning(RangeName(f"step {step}" if step.isdecimal() else text, Category.STEP))
        if layer:
            known = (phase or "").lower()
            return Meaning(RangeName(layer, Category(known) if known in _LAYER_PHASES else Category.FORWARD))
        return Meaning(RangeName(phase, Category.PHASE) if phase else RangeName(text, Category.USER))


@dataclass(frozen=True)
class Rules:
    """Rules in the order in which they are tried; the first that fits decides.

    Attributes:
        title: Whose ranges they are for.
        sources: Where that program names its ranges, for presets.
        domain: NVTX domain of the ranges, None where the rules do not say.
        otherwise: What a range is that no rule fits: ``nothing``, or ``layer``: what it would be without rules.
        rules: The rules.
    """

    title: str
    sources: tuple[str, ...] = ()
    domain: str | None = None
    otherwise: str = "nothing"
    rules: tuple[Rule, ...] = ()

    def meaning(self, text: str, category: str | None = None) -> Meaning:
        """What a range of this text and category is. What nvprof_kit itself emitted keeps its meaning."""
        for rule in self.rules:
            found = rule.meaning(text, category)
            if found is not None:
                return found
        if self.otherwise == "layer" or category in Category._value2member_map_:
            return Meaning(parse_range(text, category), ruled=False)
        return Meaning(RangeName(text, Category.USER), ruled=False)


def rules_of(
    document: Mapping[str, Any], named: str, included: Callable[[str], Mapping[str, Any]] | None = None
) -> Rules:
    """The rules of a TOML document.

    Args:
        document: The document, as ``tomllib`` gives it.
        named: The file or preset, to name it in messages.
        included: Gives the document of a preset; its rules are tried behind the document's own.

    Raises:
        UsageError: The document is not what ``docs/foreign.md`` describes.
    """
    _check_keys(document, _HEAD, named)
    otherwise = document.get("otherwise", "nothing")
    if otherwise not in _OTHERWISE:
        raise UsageError(f"{named}: otherwise = {otherwise!r}; needed one of {', '.join(_OTHERWISE)}")
    entries = document.get("range", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UsageError(f"{named}: range is not a list of tables; write each rule below a line [[range]]")
    rules = [_rule(entry, f"{named}, rule {number}") for number, entry in enumerate(entries, 1)]
    for other in document.get("include", []):
        if included is None:
            raise UsageError(f"{named}: nothing can be included here")
        rules += rules_of(included(other), other, included).rules
    if not rules and otherwise == "nothing":
        raise UsageError(f"{named}: no rule in it; write each below a line [[range]] (see docs/foreign.md)")
    return Rules(
        title=str(document.get("title", named)),
        sources=tuple(document.get("sources", ())),
        domain=document.get("domain"),
        otherwise=otherwise,
        rules=tuple(rules),
    )


def _rule(entry: Mapping[str, Any], named: str) -> Rule:
    _check_keys(entry, _KEYS, named)
    if not all(isinstance(value, str) for value in entry.values()):
        raise UsageError(f"{named}: every value must be a text in quotes")
    if "text" not in entry:
        raise UsageError(f"{named}: no text = '...', the regular expression that a range's text must match")
    text = _pattern(entry["text"], named)
    groups = dict.fromkeys(text.groupindex, "1")
    # a group called layer, phase or step needs no template
    said = {key: entry.get(key, f"{{{key}}}" if key in groups else None) for key in ("layer", "phase", "step")}
    for key, template in said.items():
        try:
            (template or "").format_map(groups)
        except (KeyError, ValueError, IndexError) as error:
            raise UsageError(f"{named}: {key} = {template!r} names no group of the expression ({error})") from None
    if entry.get("layer") and "phase" in entry and "{" not in entry["phase"] and entry["phase"] not in _LAYER_PHASES:
        raise UsageError(f"{named}: phase = {entry['phase']!r}; a layer's is one of {', '.join(_LAYER_PHASES)}")
    operator = entry.get("operator", "")
    if operator not in ("", FORWARD_OPERATOR, BACKWARD_OPERATOR):
        raise UsageError(f"{named}: operator = {operator!r}; needed {FORWARD_OPERATOR} or {BACKWARD_OPERATOR}")
    category = _pattern(entry["category"], named) if "category" in entry else None
    return Rule(text, category, said["layer"], said["phase"], said["step"], operator)


def _pattern(expression: str, named: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise UsageError(f"{named}: {expression!r} is no regular expression: {error}") from None


def _check_keys(table: Mapping[str, Any], known: frozenset[str], named: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise UsageError(f"{named}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
