"""Rules for the range names of other programs: they map a range's text to a layer, a phase, a step or an operator;
and the user's rules for the classes of kernels, which stand in the same file.

Rules are data: TOML, in a user file or a built-in preset; see ``docs/foreign.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from string import Formatter
from typing import Any, NamedTuple

from nvprof_kit._analysis.kernels import classes
from nvprof_kit._toml import TomlError, parse_toml
from nvprof_kit.errors import UsageError
from nvprof_kit.names import LAYER_PHASES, Category, RangeName, parse_range, strip_wrappers

OPERATORS = ("forward", "engine", "node")
"""The kinds of autograd operators: forward operators, the engine's events for a node, and the nodes themselves."""

PAIR = ("start", "end")
"""The sides of a layer that two ranges bound: it lasts from the start of the first to the end of the second."""

_TEMPLATES = ("layer", "phase", "step", "plain")
_KEYS = frozenset({"match", "category", "operator", "pair", "part", *_TEMPLATES})
_HEAD = frozenset({"title", "sources", "domain", "include", "otherwise", "rule", "kernel"})
_DIGITS = 18
"""Maximum digits of a sequence number; longer ones do not fit in int64 and are ignored."""
_OTHERWISE = ("nothing", "layer")
_PRESETS = files("nvprof_kit._analysis.foreign") / "presets"


class Meaning(NamedTuple):
    """The meaning of a range.

    Attributes:
        name: Its path, phase or step, and its category. A path that begins with a dot is relative to the enclosing
            layer.
        operator: One of `OPERATORS`, or '' if it is not an autograd operator.
        sequence: The operator's sequence number, -1 if none.
        ruled: Whether a rule matched.
        pair: One of `PAIR`, or '' if the range is a layer itself.
        part: The part of the layer that a range of a pair is, '' if none.
    """

    name: RangeName
    operator: str = ""
    sequence: int = -1
    ruled: bool = True
    pair: str = ""
    part: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule. Templates refer to groups of the regular expression: ``layers.{number}``.

    Attributes:
        match: Pattern for the full text of a range.
        category: Pattern for the full name of its category, None for any.
        layer, phase, step: Templates; None if the rule does not define them.
        plain: Template that extracts the name from the text; the result is interpreted as if no rule matched.
        operator: One of `OPERATORS`, or ''.
        pair: One of `PAIR`, or ''.
        part: The part of the layer that the range itself is, for a pair.
    """

    match: re.Pattern[str]
    category: re.Pattern[str] | None = None
    layer: str | None = None
    phase: str | None = None
    step: str | None = None
    plain: str | None = None
    operator: str = ""
    pair: str = ""
    part: str = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any], named: str) -> Rule:
        """The rule of a table.

        Args:
            entry: The table.
            named: What error messages call it.

        Raises:
            UsageError: It is not a rule of ``docs/foreign.md``.
        """
        _check_keys(entry, _KEYS, named)
        for key, value in entry.items():
            if not isinstance(value, str):
                raise UsageError(f"{named}: {key} = {value!r}; every value must be a text in quotes")
        if "match" not in entry:
            raise UsageError(f"{named}: lacks match, the regular expression that the whole text of a range must match")
        match = _pattern(entry["match"], named)
        groups = dict.fromkeys(match.groupindex, "1")
        # a group with the name of a key needs no template
        templates = {key: entry.get(key, f"{{{key}}}" if key in groups else None) for key in _TEMPLATES}
        for key, template in templates.items():
            try:  # a format width or an attribute access could create huge strings or reach into Python objects
                fields = [field[1:] for field in Formatter().parse(template or "") if field[1] is not None]
                unknown_group = next((repr(name) for name, *spec in fields if name not in groups or any(spec)), "")
            except ValueError as error:
                unknown_group = str(error)
            if unknown_group:
                raise UsageError(f"{named}: {key} = {template!r} names an unknown group ({unknown_group})")
        if entry.get("layer") and "phase" in entry and "{" not in entry["phase"] and entry["phase"] not in LAYER_PHASES:
            raise UsageError(f"{named}: phase = {entry['phase']!r}; a layer's is one of {', '.join(LAYER_PHASES)}")
        operator = entry.get("operator", "")
        if operator not in ("", *OPERATORS):
            raise UsageError(f"{named}: operator = {operator!r}; needed one of {', '.join(OPERATORS)}")
        pair = entry.get("pair", "")
        if pair not in ("", *PAIR):
            raise UsageError(f"{named}: pair = {pair!r}; needed one of {', '.join(PAIR)}")
        category = _pattern(entry["category"], named) if "category" in entry else None
        return cls(match, category, **templates, operator=operator, pair=pair, part=entry.get("part", ""))

    def meaning(self, text: str, category: str | None) -> Meaning | None:  # noqa: PLR0911
        """The meaning of a range by this rule, None if the rule does not match."""
        match = self.match.fullmatch(text)
        if not match or (self.category is not None and not self.category.fullmatch(category or "")):
            return None
        groups = {name: value or "" for name, value in match.groupdict().items()}
        templates = (self.layer, self.phase, self.step)
        layer, phase, step = (template and template.format_map(groups) for template in templates)
        if self.operator:
            sequence = groups.get("sequence", "")
            name = RangeName(layer if layer is not None else text, Category.USER)
            is_number = sequence.isdecimal() and len(sequence) <= _DIGITS
            return Meaning(name, self.operator, int(sequence) if is_number else -1)
        if self.plain is not None:
            return Meaning(parse_range(self.plain.format_map(groups), category), ruled=False)
        if step is not None:
            return Meaning(RangeName(f"step {step}" if step.isdecimal() else text, Category.STEP))
        layer = strip_wrappers(layer) if layer else layer
        if layer and self.pair:
            return Meaning(RangeName(layer, Category.USER), pair=self.pair, part=self.part)
        if layer:
            is_number = (phase or "").lower()
            return Meaning(RangeName(layer, Category(is_number) if is_number in LAYER_PHASES else Category.FORWARD))
        return Meaning(RangeName(phase, Category.PHASE) if phase else RangeName(text, Category.USER))


@dataclass(frozen=True)
class Rules:
    """Rules in the order in which they are tried; the first match wins.

    Attributes:
        title: The program that the rules are for.
        sources: Where that program names its ranges, for presets.
        domain: NVTX domain of the ranges, None if the rules do not specify one.
        otherwise: How to treat a range that no rule matches: ``nothing``, or ``layer``, as it would be without rules.
        rules: The rules.
        kernels: Rules for the classes of kernels, tried before the built-in ones.
    """

    title: str
    sources: tuple[str, ...] = ()
    domain: str | None = None
    otherwise: str = "nothing"
    rules: tuple[Rule, ...] = ()
    kernels: tuple[classes.Rule, ...] = ()

    def meaning(self, text: str, category: str | None = None) -> Meaning:
        """The meaning of a range with this text and category; this package's categories override rules."""
        ours = category in Category._value2member_map_
        for rule in () if ours else self.rules:
            if (meaning := rule.meaning(text, category)) is not None:
                return meaning
        if self.otherwise == "layer" or ours:
            return Meaning(parse_range(text, category), ruled=False)
        return Meaning(RangeName(text, Category.USER), ruled=False)


def presets() -> tuple[str, ...]:
    """The names of the presets."""
    names = (file.name for file in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def preset(name: str) -> Rules:
    """A preset by name.

    Raises:
        UsageError: There is no preset with this name.
    """
    return parse_rules(_preset_text(name), name)


def _preset_text(name: str) -> str:
    if name not in presets():
        raise UsageError(f"no preset {name!r}; available: {', '.join(presets())}")
    return (_PRESETS / f"{name}.toml").read_text(encoding="utf-8")


def parse_rules(text: str, source: str) -> Rules:
    """Parse rules from TOML.

    Args:
        text: The TOML text.
        source: Name of the source in error messages.

    Raises:
        UsageError: The text is not TOML, or does not follow ``docs/foreign.md`` and ``docs/kernel-classes.md``.
    """
    try:
        document = parse_toml(text)
    except TomlError as error:
        raise UsageError(f"{source}: not TOML: {error}") from None
    _check_keys(document, _HEAD, source)
    for key in ("title", "domain"):
        if not isinstance(document.get(key, ""), str):
            raise UsageError(f"{source}: {key} = {document[key]!r}; needed a text in quotes")
    for key in ("sources", "include"):
        texts = document.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(entry, str) for entry in texts):
            raise UsageError(f'{source}: {key} = {texts!r}; needed a list of texts: {key} = ["…"]')
    otherwise = document.get("otherwise", "nothing")
    if otherwise not in _OTHERWISE:
        raise UsageError(f"{source}: otherwise = {otherwise!r}; needed one of {', '.join(_OTHERWISE)}")
    for key in ("rule", "kernel"):
        tables = document.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
            raise UsageError(f"{source}: {key} is not a list of tables; write each below a line [[{key}]]")
    rules = [Rule.of(table, f"{source}: rule {number}") for number, table in enumerate(document.get("rule", []), 1)]
    tables = document.get("kernel", [])
    kernels = [classes.rule_of(table, f"{source}: kernel {number}") for number, table in enumerate(tables, 1)]
    for other in document.get("include", []):
        rules += parse_rules(_preset_text(other), other).rules
    if not rules and not kernels:
        raise UsageError.of("no-rules", source=source)
    return Rules(
        title=document.get("title", source),
        sources=tuple(document.get("sources", ())),
        domain=document.get("domain"),
        otherwise=otherwise,
        rules=tuple(rules),
        kernels=tuple(kernels),
    )


def _pattern(expression: str, named: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise UsageError(f"{named}: {expression!r} is not a regular expression: {error}") from None


def _check_keys(table: Mapping[str, Any], allowed: frozenset[str], named: str) -> None:
    if unknown := sorted(set(table) - allowed):
        raise UsageError(f"{named}: unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
