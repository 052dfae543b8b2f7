"""The answers to one question about several captures, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._report.export import tables
from nvprof_kit._results.base import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Several(Result):
    """Several answers, whose rows a first column ``capture`` tells apart.

    Attributes:
        results: The answers, each with its own selection.
    """

    results: Sequence[Result]

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, each with the file that it is of."""
        return tuple(f"{result.sources[0]}: {one}" for result in self.results for one in result.warnings)

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return self.results[0].schema

    @property
    def answered(self) -> tuple[str, ...]:
        """The files that they were made of."""
        return tuple(str(source) for result in self.results for source in result.sources)

    def to_frame(self) -> pd.DataFrame:
        """All rows, with the column ``capture``."""
        return tables.with_capture([(str(result.sources[0]), result.frame()) for result in self.results])

    def frame(self) -> pd.DataFrame:
        """The same: each answer has selected its rows."""
        return self.to_frame()

    def parts(self) -> list[RenderableType]:
        """One below the other."""
        return [part for result in self.results for part in result.parts()]
