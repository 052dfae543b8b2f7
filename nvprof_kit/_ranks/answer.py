"""All tables of a job's ranks, and what may be missing in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._analysis.layers.fold import mark_ranked
from nvprof_kit._ranks.clocks import COARSE_NS, Alignment
from nvprof_kit._ranks.columns import COLUMNS
from nvprof_kit._ranks.verdict import Verdict
from nvprof_kit._result import formats
from nvprof_kit._result.result import Result, table_named
from nvprof_kit.errors import UsageError
from nvprof_kit.issues import Issue, in_order, listing, plural

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._result.writer import Document

_SCHEMAS = {f"ranks-{view}": columns for view, columns in COLUMNS.items()}

REPLAYED = ("groups", "bubbles", "micro-batches", "critical-path", "what-if")
"""Those that are only made of a limited number of collectives; else they are empty."""


@dataclass(frozen=True, repr=False, eq=False)
class RankTable(Result):
    """A table of a job.

    Attributes:
        name: Name of the table: ``waits``, ``charges``, ``layers``, …
        rows: The table; the same as `to_frame`.
        warnings: What may be missing or distorted in the job.
    """

    name: str
    rows: pd.DataFrame
    warnings: tuple[Issue, ...] = ()

    columns: ClassVar = _SCHEMAS

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return f"ranks-{self.name}"

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The selected rows; where equal blocks are folded, ``charges`` with ``folded_into`` and ``unlike``."""
        if not self.select.fold or self.name != "charges":
            return super().to_frame(view)
        return self.select.of(mark_ranked(self.table(view), COLUMNS["charges"], "wait_ns"))


@dataclass(frozen=True, repr=False, eq=False)
class Ranks(Result):
    """All tables of a job; `columns` has what they hold.

    Attributes:
        verdict: Which rank the others wait for, if any.
        clocks: Offset and drift of each clock.
        waits: Each wait.
        charges: Total waiting by what caused it.
        matrix: Who waited for whom; columns waiting_rank, late_rank, wait_ns.
        layers: One row per layer, phase and rank.
        groups: The parallel groups; this and the following are empty for a job with too many collectives.
        bubbles, micro_batches: Of the pipeline; empty without pipeline parallelism.
        critical_path, what_if: What the step's time depends on, and what it would be.
        replay_error: Difference between a replay with unchanged durations and the measurement, as a fraction of the
            step time; None without a replay.
        steps: Number of steps.
        collectives: Number of matched collectives.
        total_wait_ns: Total waiting time of all ranks.
        warnings: What may be missing or distorted; each sentence says what to do about it.
        make_page: Makes the page of the job; `save` writes it as ``.html``.
    """

    verdict: Verdict
    clocks: pd.DataFrame
    waits: pd.DataFrame
    charges: pd.DataFrame
    matrix: pd.DataFrame
    layers: pd.DataFrame
    groups: pd.DataFrame
    bubbles: pd.DataFrame
    micro_batches: pd.DataFrame
    critical_path: pd.DataFrame
    what_if: pd.DataFrame
    replay_error: float | None
    steps: int
    collectives: int
    total_wait_ns: int
    warnings: tuple[Issue, ...]
    make_page: Callable[[], Document]

    columns: ClassVar = _SCHEMAS

    def table(self, view: str | None = None) -> pd.DataFrame:
        """One table: ``waits`` (by default), ``charges``, ``layers``, ``clocks``, ``groups``, ``bubbles``,
        ``micro-batches``, ``critical-path`` or ``what-if``.
        """
        return table_named({name: getattr(self, name.replace("-", "_")) for name in COLUMNS}, view or "waits")

    def only(self, view: str) -> RankTable:
        """One of the tables of `to_frame` as a separate result.

        Raises:
            UsageError: The table needs a replay, and the job has too many collectives for one, or none.
        """
        if view in REPLAYED and self.not_replayed:
            raise UsageError(f"no table {view}: {self.not_replayed}")
        return RankTable(view, self.table(view), self.warnings, sources=self.sources)

    @property
    def schema(self) -> str:
        """Name of the JSON schema of the table ``waits``."""
        return "ranks-waits"

    def encode(self, data_format: str) -> bytes:
        """As in `Result`; ``html`` is the page of the job, ``json`` all tables."""
        if data_format == "html":
            return self.make_page().data
        if data_format == "json":
            return (formats.as_json(self.to_dict(), indent=1) + "\n").encode("utf-8", "replace")
        return super().encode(data_format)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain lists and numbers, as in JSON; missing values are None."""
        tables = self.select.each({view: self.table(view) for view in COLUMNS})
        unknown: dict[str, str] = {}
        for view, table in tables.items():
            unknown |= formats.reasons(table, COLUMNS[view])
        if self.not_replayed:
            unknown |= {name.replace("-", "_"): self.not_replayed for name in ("replay_error", *REPLAYED)}
        return {
            **formats.schema_of("ranks"),
            "verdict": asdict(self.verdict),
            **{view.replace("-", "_"): formats.records(table) for view, table in tables.items()},
            "replay_error": self.replay_error,
            "total_wait_ns": self.total_wait_ns,
            "warnings": list(in_order(self.warnings)),
            "sources": [str(source) for source in self.sources],
            "unknown": unknown,
            "columns": {
                view.replace("-", "_"): formats.described(table, COLUMNS[view]) for view, table in tables.items()
            },
        }

    @property
    def not_replayed(self) -> str | None:
        """Why the tables that replay the collectives are empty; None if they are not."""
        if self.replay_error is not None:
            return None
        if not self.collectives:
            return "no collective was found on several ranks; name the captures of all ranks of a job"
        return f"{self.collectives:,} collectives are too many to replay; name the captures of fewer ranks"


def job_size(ranks: int, steps: int, collectives: int) -> list[str]:
    """The size of a job; how many steps it has may be unknown."""
    counts = (plural(ranks, "rank"), plural(steps, "step") * (steps > 0), plural(collectives, "matched collective"))
    return [count for count in counts if count]


_WARNED_RANKS = 8
"""Maximum number of ranks with a warning of their own."""


def job_warnings(aligned: Alignment) -> list[str]:
    """What may be missing in a job: ranks, clocks, steps, collectives."""
    tables, clocks = aligned.tables, aligned.clocks
    ranks, steps = tables.ranks, tables.frame("step_ranges")
    warnings: list[str] = []
    if tables.has_unlike_layers:
        evidence = [
            f"{str(source) or 'named ranges or modules'} ({listing(of_source['rank'].tolist())})"
            for source, of_source in ranks.groupby("evidence")
        ]
        how = "without layers" if tables.has_unlike_phases else "by phase, without layers"
        warnings.append(Issue.of("unlike-evidence", how=how, evidence=", ".join(evidence)))
    world = max(int(ranks["world_size"].max()), int(ranks["rank"].max()) + 1)
    if missing := sorted(set(range(world)) - set(ranks["rank"])):
        facts = {"count": len(missing), "world": plural(world, "rank"), "are": "is" if len(missing) == 1 else "are"}
        warnings.append(Issue.of("missing-ranks", ranks=listing(missing), **facts))
    if unaligned := clocks[clocks["offset_ns"].isna()]["rank"].tolist():
        verbs = "shares no collective with the others and is/share no collective with the others and are"
        who = plural(len(unaligned), "rank", verbs)
        warnings.append(Issue.of("unaligned", who=who, ranks=listing(unaligned)))
    if drifting := clocks[clocks["residual_ns"] > COARSE_NS]["rank"].tolist():
        who = plural(len(drifting), "clock", "is/are")
        warnings.append(Issue.of("coarse-clocks", who=who, ranks=listing(drifting), limit_ms=COARSE_NS / 1e6))
    # ranks that started later, ended early, or recorded a different window
    largest = steps["steps"].max()
    is_odd = {"disjoint-steps": (steps["shared"] == 0) & (len(steps) > 1)}
    is_odd["fewer-steps"] = (steps["steps"] < largest) & (steps["shared"] > 0)
    for code, of_ranks in ((code, steps[is_of_code]) for code, is_of_code in is_odd.items()):
        if len(of_ranks):
            who, numbers = plural(len(of_ranks), "rank", "has/have"), listing(of_ranks["rank"].tolist())
            example: Any = of_ranks.iloc[0].to_dict()
            warnings.append(Issue.of(code, who=who, ranks=numbers, most=largest, **example))
    in_steps = tables.matched_steps()
    matched = in_steps[in_steps["matched"]]
    lacking = in_steps[~in_steps["matched"] & in_steps["step"].isin(matched["step"])]
    lacking = lacking[lacking["rank"].isin(matched["rank"])]
    ranges = lacking.groupby("rank")["step"].agg(["min", "max", "size"]).head(_WARNED_RANKS)
    warnings += [
        Issue.of("unmatched-steps", rank=rank, first=first, last=last, count=count)
        for rank, first, last, count in ranges.itertuples()
    ]
    if mismatched := tables.value("unlike"):
        warnings.append(Issue.of("unlike-collectives", who=plural(mismatched, "collective", "is/are")))
    if unmatched := tables.unmatched():
        verbs = "is on one rank only and/are on one rank only and"
        warnings.append(Issue.of("unmatched-collectives", who=plural(unmatched, "collective", verbs)))
    return [*warnings, *aligned.warnings]
