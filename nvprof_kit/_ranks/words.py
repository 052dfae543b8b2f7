"""Sentences about a job: missing data, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvprof_kit._trace.jobs.tables import JobTables

if TYPE_CHECKING:
    import pandas as pd


COARSE_NS = 200_000
"""Warn about a clock with a larger residual."""


SAID = 8
"""Maximum number of ranks with a warning of their own."""


def many(number: int, noun: str, verb: str = "") -> str:
    """``1 rank``, ``2,000 ranks``; with a verb as singular/plural, ``1 rank is``, ``2 ranks are``."""
    singular, _, several = verb.partition("/")
    return f"{number:,} {noun}" + "s" * (number != 1) + (f" {singular if number == 1 else several}" if verb else "")


def some(numbers: Sequence[int]) -> str:
    """The first eight numbers, separated by commas."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def of_job(ranks: int, steps: int, collectives: int) -> list[str]:
    """The size of a job."""
    return [many(ranks, "rank"), many(steps, "step"), many(collectives, "matched collective")]


def job_warnings(ranks: pd.DataFrame, clocks: pd.DataFrame, tables: JobTables) -> list[str]:
    """What may be missing in a job: ranks, clocks, steps, collectives."""
    present = set(ranks["rank"].tolist())
    world = max(int(ranks["world_size"].max()), max(present) + 1)
    warnings = []
    if tables.has_unlike_layers:
        evidence = [
            f"{source or 'named ranges or modules'} ({some(ranks[ranks['evidence'] == source]['rank'].tolist())})"
            for source in sorted(set(ranks["evidence"]))
        ]
        how = "without layers" if tables.has_unlike_phases else "by phase, without layers"
        warnings.append(
            f"ranks are compared {how}, because theirs are from different evidence: {', '.join(evidence)}; "
            "record all ranks alike, or read all with the same --domain and --rules"
        )
    missing = sorted(set(range(world)) - present)
    if missing:
        warnings.append(
            f"{len(missing)} of {many(world, 'rank')} {'is' if len(missing) == 1 else 'are'} missing "
            f"({some(missing)}): the slowest rank may be one of them; profile them too, or take the waits as "
            "lower bounds"
        )
    unaligned = clocks[clocks["offset_ns"].isna()]["rank"].tolist()
    if unaligned:
        verbs = "shares no collective with the others and is/share no collective with the others and are"
        warnings.append(f"{many(len(unaligned), 'rank', verbs)} not aligned ({some(unaligned)})")
    drifting = clocks[clocks["residual_ns"] > COARSE_NS]
    if len(drifting):
        warnings.append(
            f"{many(len(drifting), 'clock', 'is/are')} aligned to no better than {COARSE_NS / 1e6} ms "
            f"({some(drifting['rank'].tolist())}): shorter waits between them cannot be trusted"
        )
    warnings += _of_steps(tables.step_ranges())
    warnings += [
        f"no collective of rank {row.rank} matches in {row.steps} of the steps {row.first} to {row.last}, which other "
        "ranks have too: its clock may have jumped, or its step numbers differ; it is judged by its other steps"
        for row in tables.without_match().head(SAID).itertuples()
    ]
    if mismatched := tables.unlike():
        warnings.append(
            f"{many(mismatched, 'collective', 'is/are')} of different kinds on different ranks and left out"
        )
    if unmatched := tables.unmatched():
        verbs = "is on one rank only and/are on one rank only and"
        warnings.append(f"{many(unmatched, 'collective', verbs)} cannot be matched")
    return warnings


def _of_steps(steps: pd.DataFrame) -> list[str]:
    """Ranks without steps that others have: they started later, ended early, or recorded a different window.

    Args:
        steps: See `nvprof_kit._trace.jobs.tables.JobTables.step_ranges`.
    """
    if len(steps) < 2:
        return []
    warnings, longest = [], int(steps["steps"].max())
    disjoint = steps[steps["shared"] == 0]
    if len(disjoint):
        first = disjoint.iloc[0]
        warnings.append(
            f"{many(len(disjoint), 'rank', 'has/have')} no step in common with another one "
            f"({some(disjoint['rank'].tolist())}; rank {first['rank']} has steps {first['first']} to {first['last']}): "
            "capture the same window of one run on every rank"
        )
    fewer = steps[(steps["steps"] < longest) & (steps["shared"] > 0)]
    if len(fewer):
        first = fewer.iloc[0]
        warnings.append(
            f"{many(len(fewer), 'rank', 'has/have')} fewer steps than the others ({some(fewer['rank'].tolist())}; "
            f"rank {first['rank']} has steps {first['first']} to {first['last']}, {first['steps']} of {longest}): its "
            "window began later or it ended early; the verdict covers the steps that most ranks have"
        )
    return warnings
