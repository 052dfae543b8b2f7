"""``python -I query_child.py``: run one query with limits; started by `nvprof_kit._agents.query`.

Stdin is a line of JSON and the tables as Arrow streams; stdout is a line of JSON and the first rows as an Arrow stream.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def main() -> None:
    """Answer the query on stdin."""
    head = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = head["path"]
    import pyarrow as pa

    from nvprof_kit._api.sql import answer
    from nvprof_kit.errors import NvprofKitError

    read = {name: pa.ipc.open_stream(sys.stdin.buffer).read_all().to_pandas() for name in head["tables"]}
    import pandas as pd

    tables = {name: read.get(name, pd.DataFrame()) for name in head["known"]}
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = head["addresses"] if hard == resource.RLIM_INFINITY else min(head["addresses"], hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    reply: dict[str, str | int]
    try:
        found = answer(head["query"], tables, head["longest_s"], head["most_bytes"])
    except MemoryError:
        reply, found = {"error": "this query takes more memory than a query may; restrict it"}, pd.DataFrame()
    except NvprofKitError as error:
        reply, found = {"error": str(error)}, pd.DataFrame()
    else:
        reply = {"count": len(found)}
    shown = pa.Table.from_pandas(found.head(head["most_rows"]), preserve_index=False)
    out = sys.stdout.buffer
    out.write(json.dumps(reply).encode() + b"\n")
    with pa.ipc.new_stream(out, shown.schema) as stream:
        stream.write_table(shown)
    out.flush()
    os._exit(0)  # a query that was interrupted may still be running


if __name__ == "__main__":
    main()
