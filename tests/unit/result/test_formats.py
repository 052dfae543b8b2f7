"""An answer as data."""

from __future__ import annotations

import io

import pandas as pd
import pyarrow.parquet as pq
from support.captures.layers_result import layers_result

TABLE = pd.DataFrame(
    {
        "step": pd.array([3, None], dtype="Int64"),
        "layer": ['a|b, "c"', "(none)"],
        "gpu_self_ns": [9_007_199_254_740_993, 1],  # the first is no float64
        "share": [1 / 3, 0.0],
    }
)
ANSWER = layers_result(rows=TABLE, warnings=())
RECORDS = [
    {"step": 3, "layer": 'a|b, "c"', "gpu_self_ns": 9007199254740993, "share": 0.3333333333333333},
    {"step": None, "layer": "(none)", "gpu_self_ns": 1, "share": 0.0},
]


def test_csv() -> None:
    assert ANSWER.encode("csv").decode() == (
        'step,layer,gpu_self_ns,share\n3,"a|b, ""c""",9007199254740993,0.3333333333333333\n,(none),1,0.0\n'
    )


def test_markdown() -> None:
    assert ANSWER.encode("md").decode() == (
        "| step | layer | gpu_self_ns | share |\n"
        "| ---: | --- | ---: | ---: |\n"
        '| 3 | a\\|b, "c" | 9007199254740993 | 0.333333 |\n'
        "|  | (none) | 1 | 0 |\n"
    )


def test_parquet_keeps_types_and_missing_values() -> None:
    table = pq.read_table(io.BytesIO(ANSWER.encode("parquet")))
    assert table.to_pylist() == RECORDS
    assert [str(field.type) for field in table.schema if field.name != "layer"] == ["int64", "int64", "double"]
