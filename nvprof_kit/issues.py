"""What a reader or an analysis says is missing or doubtful."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from nvprof_kit._toml import read_toml

Severity = Literal["error", "warning", "note"]
"""``error``: figures are wrong, such as sums that lack lost kernels. ``warning``: some are distorted or missing.
``note``: good to know when reading them.
"""

SMALL = 0.01
"""An issue that concerns a smaller share of the time is printed only by ``doctor``."""


class Issue(str):
    """One thing that is missing or doubtful, as a sentence that says what to do about it.

    Attributes:
        code: What it is about, in one word for programs.
        severity: How much it matters.
        share: The share of the time or of the events that it concerns; 1 if it concerns all, or if that is unknown.
    """

    code: str
    severity: Severity
    share: float

    def __new__(cls, code: str, severity: Severity, share: float, text: str) -> Issue:
        """An issue.

        Args:
            code: What it is about.
            severity: How much it matters.
            share: The share of the time or of the events that it concerns, 0 to 1.
            text: The sentence.
        """
        issue = super().__new__(cls, text)
        issue.code, issue.severity, issue.share = code, severity, min(max(float(share), 0.0), 1.0)
        return issue

    @classmethod
    def of(cls, code: str, share: float = 1.0, /, **facts: object) -> Issue:
        """An issue with the severity and the sentence that ``issues.toml`` has for it.

        Args:
            code: What it is about; where it has several sentences, with the case behind a colon.
            share: As above.
            facts: What the sentence names.
        """
        severity, sentence = read_toml("nvprof_kit", "issues.toml")[code]
        return cls(code.partition(":")[0], severity, share, sentence.format(share=share, **facts))

    def __getnewargs__(self) -> tuple[str, Severity, float, str]:  # type: ignore[override]
        """For copies and pickles."""
        return self.code, self.severity, self.share, str(self)

    @property
    def printed(self) -> bool:
        """Whether it is printed beside an answer; ``doctor`` and JSON have every issue."""
        return self.severity == "error" or self.share >= SMALL


def as_issues(code: str, texts: Iterable[str], severity: Severity = "warning") -> tuple[Issue, ...]:
    """Sentences as issues that concern everything; those that are issues already stay as they are."""
    return tuple(text if isinstance(text, Issue) else Issue(code, severity, 1.0, text) for text in texts)


_ORDER = {"error": 0, "warning": 1, "note": 2}


def in_order(issues: Iterable[str]) -> tuple[Issue, ...]:
    """Each issue once: errors first, then warnings and notes, each by the share that they concern."""
    distinct = dict.fromkeys(as_issues("other", issues))
    return tuple(sorted(distinct, key=lambda issue: (_ORDER[issue.severity], -issue.share)))


def printed(issues: Iterable[str]) -> tuple[Issue, ...]:
    """The issues that are printed beside an answer, in their order."""
    return tuple(issue for issue in in_order(issues) if issue.printed)


def plural(number: int, noun: str, verb: str = "") -> str:
    """``1 rank``, ``2,000 ranks``; with a verb as singular/plural, ``1 rank is``, ``2 ranks are``."""
    singular, _, plural = verb.partition("/")
    is_one = bool(number == 1)  # of NumPy's numbers too
    return f"{number:,} {noun}" + "s" * (not is_one) + (f" {singular if is_one else plural}" if verb else "")


def listing(items: Sequence[object], count: int = 8) -> str:
    """The first of some numbers or names, separated by commas."""
    return ", ".join(map(str, items[:count])) + (", …" if len(items) > count else "")


def shortened(name: str, length: int = 60) -> str:
    """The start of a long name, with … where it is cut."""
    return name if len(name) <= length else f"{name[: length - 1]}…"
