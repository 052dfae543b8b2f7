"""The columns of the tables of a job."""

from __future__ import annotations

from nvprof_kit._result.column import read_tables

COLUMNS = read_tables("nvprof_kit._ranks")
"""The columns of each table."""
