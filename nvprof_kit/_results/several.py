"""The results of one question about several captures, combined."""

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
    """Several results. The first column, ``capture``, says where a row comes from.

    Attributes:
        results: The results, each with its own selection.
    """

    results: Sequence[Result]

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, each with its file."""
        return tuple(f"{result.sources[0]}: {one}" for result in self.results for one in result.warnings)

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return self.results[0].schema

    @property
    def answered(self) -> tuple[str, ...]:
        """The input files, as text."""
        return tuple(str(source) for result in self.results for source in result.sources)

    def to_frame(self) -> pd.DataFrame:
        """The rows of all results, with the column ``capture``."""
        return tables.with_capture([(str(result.sources[0]), result.frame()) for result in self.results])

    def frame(self) -> pd.DataFrame:
        """The same as `to_frame`: each result has already selected its rows."""
        return self.to_frame()

    def parts(self) -> list[RenderableType]:
        """The printed results, one below the other."""
        return [part for result in self.results for part in result.parts()]
