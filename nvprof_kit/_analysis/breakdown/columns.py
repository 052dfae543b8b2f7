"""The columns of a breakdown."""

from __future__ import annotations

from nvprof_kit._result.column import read_tables

COLUMNS = read_tables("nvprof_kit._analysis.breakdown")
"""The columns of each table."""
