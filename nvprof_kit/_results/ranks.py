"""What a job of many ranks tells, as answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class JobTable(Result):
    """A table of a job.

    Attributes:
        name: What it is called.
        frame: Its rows.
        columns: What its columns mean.
        warnings: What may be missing or distorted in the job.
        top: Lines that are printed.
    """

    name: str
    frame: pd.DataFrame
    columns: Mapping[str, str]
    warnings: tuple[str, ...] = field(default=(), kw_only=True)
    top: int = field(default=20, kw_only=True)

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.frame

    def parts(self) -> list[RenderableType]:
        """The first lines of the table, and how many more there are."""
        from rich.text import Text

        from nvprof_kit._report.text.ranks import table_of

        rest = len(self.frame) - self.top
        more = [Text(f"{rest:,} more; to_frame() has them all", "dim")] if rest > 0 else []
        return [Text(self.name, "bold"), table_of(self.frame.head(self.top)), *more]
