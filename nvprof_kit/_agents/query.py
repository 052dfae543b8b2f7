"""Run a client's SQL in a child process with limited time and memory.

A query can be interrupted between two pieces of data, but a single function call on a huge value cannot, and its memory
is not counted by the database. The process can be ended at any time, and has its own memory limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

LONGEST_S = 60.0
_STARTING_S = 30.0
_MOST_BYTES = 1 << 30
_ADDRESSES = 4 << 30
"""Address space of the process besides the tables: the libraries, and the database's own limit several times over."""


def bounded_query(query: str, tables: Mapping[str, pd.DataFrame], most_rows: int) -> tuple[pd.DataFrame, int]:
    """The first rows of a query's result.

    Args:
        query: A query of DuckDB's SQL.
        tables: The tables by name; those whose names occur in the query are handed over.
        most_rows: Maximum number of rows to return.

    Returns:
        The rows, and how many the query has in all.

    Raises:
        UsageError: The query is invalid, accesses files or the network, or exceeds a limit.
    """
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    wanted = [name for name in tables if name.lower() in query.lower()]
    for name in wanted:
        table = pa.Table.from_pandas(tables[name], preserve_index=False)
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    data = sink.getvalue()
    head = json.dumps({
        "path": sys.path, "query": query, "tables": wanted, "known": [*tables], "most_rows": most_rows,
        "most_bytes": _MOST_BYTES, "longest_s": LONGEST_S, "addresses": _ADDRESSES + 4 * data.size,
    })  # fmt: skip
    # -I: import nothing from the current folder or the environment before the parent's path is set
    command = [sys.executable, "-I", str(Path(__file__).with_name("query_child.py"))]
    handed = head.encode() + b"\n" + data.to_pybytes()
    try:
        done = subprocess.run(command, input=handed, capture_output=True, timeout=LONGEST_S + _STARTING_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"this query was ended after {LONGEST_S:g} s; restrict it") from None
    first_line, _, rows = done.stdout.partition(b"\n")
    try:
        answer = json.loads(first_line)
    except ValueError:
        raise UsageError("this query was ended: it takes more memory than a query may; restrict it") from None
    if "error" in answer:
        raise UsageError(answer["error"])
    return pa.ipc.open_stream(rows).read_all().to_pandas(), answer["count"]
