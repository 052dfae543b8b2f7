"""All tables of a job's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvprof_kit._ranks.verdict import Verdict
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "nvprof-kit/ranks"
"""Name of the JSON schema."""

VERSION = 1
"""Its version."""


@dataclass(frozen=True)
class RanksAnswer:
    """The result of ``nvprof-kit ranks``.

    Attributes:
        verdict: Which rank the others wait for, if any.
        clocks: Offset and drift of each clock; columns `nvprof_kit._ranks.clocks.COLUMNS`.
        waits: Each wait; columns `nvprof_kit._ranks.waits.WAIT_COLUMNS`.
        charges: Total waiting by what caused it; columns `nvprof_kit._ranks.waits.CHARGE_COLUMNS`.
        matrix: Who waited for whom; columns waiting_rank, late_rank, wait_ns.
        layers: One row per layer, phase and rank; columns `nvprof_kit._ranks.stages.LAYER_COLUMNS`.
        critical_path: Columns `nvprof_kit._ranks.replay.PATH_COLUMNS`; empty for a job with too many
            collectives.
        what_if: Columns `nvprof_kit._ranks.replay.WHAT_IF_COLUMNS`; empty for a job with too many collectives.
        replay_error: Difference between a replay with unchanged durations and the measurement, as a fraction of the
            step time; None without a replay.
        steps: Number of steps.
        collectives: Number of matched collectives.
        total_wait_ns: Total waiting time of all ranks.
        warnings: What may be missing or distorted; each sentence says what to do about it.
        groups: Columns `nvprof_kit._ranks.groups.GROUP_COLUMNS`; None if not computed.
        bubbles: Columns `nvprof_kit._ranks.stages.BUBBLE_COLUMNS`; empty without pipeline parallelism.
        micro_batches: Columns `nvprof_kit._ranks.stages.MICRO_BATCH_COLUMNS`; empty without pipeline
            parallelism.
    """

    verdict: Verdict
    clocks: pd.DataFrame
    waits: pd.DataFrame
    charges: pd.DataFrame
    matrix: pd.DataFrame
    layers: pd.DataFrame
    critical_path: pd.DataFrame
    what_if: pd.DataFrame
    replay_error: float | None
    steps: int
    collectives: int
    total_wait_ns: int
    warnings: tuple[Issue, ...]
    groups: pd.DataFrame | None = None
    bubbles: pd.DataFrame | None = None
    micro_batches: pd.DataFrame | None = None

    def table(self, view: str) -> pd.DataFrame:
        """A table by its name on the command line, for example ``critical-path``."""
        found: pd.DataFrame = getattr(self, view.replace("-", "_"))
        return found

    @property
    def not_replayed(self) -> str | None:
        """Why the tables that replay the collectives are empty; None if they are not."""
        if self.replay_error is not None:
            return None
        if not self.collectives:
            return "no collective was found on several ranks; name the captures of all ranks of a job"
        return f"{self.collectives:,} collectives are too many to replay; name the captures of fewer ranks"

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain lists and numbers; missing values are None."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "verdict": self.verdict.to_dict(),
            "clocks": _records(self.clocks),
            "waits": _records(self.waits),
            "charges": _records(self.charges),
            "layers": _records(self.layers),
            "critical_path": _records(self.critical_path),
            "what_if": _records(self.what_if),
            "groups": _records(self.groups),
            "bubbles": _records(self.bubbles),
            "micro_batches": _records(self.micro_batches),
            "replay_error": self.replay_error,
            "total_wait_ns": self.total_wait_ns,
            "warnings": list(self.warnings),
        }


def _records(frame: pd.DataFrame | None) -> list[dict[str, Any]]:
    if frame is None:
        return []
    plain = frame.astype(object).where(frame.notna(), None)
    rows: list[dict[str, Any]] = plain.to_dict("records")
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
