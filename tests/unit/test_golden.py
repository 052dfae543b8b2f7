"""How answers are compared with golden files."""

from __future__ import annotations

import pytest
from support.golden import with_columns_of

EXPECTED = 'layer,gpu_self_ns\n"a, b",1\n(none),2\n'


def test_a_new_column_rewrites_no_golden_file() -> None:
    assert with_columns_of(EXPECTED, 'layer,flop,gpu_self_ns\n"a, b",7,1\n(none),,2\n') == EXPECTED


@pytest.mark.parametrize(
    "found", ['layer,gpu_self_ns\n"a, b",1\n(none),3\n', 'layer,gpu_self_ns\n"a, b",1\n', "layer\na\n"]
)
def test_another_value_a_row_or_a_column_that_is_gone_fails(found: str) -> None:
    with pytest.raises(AssertionError):
        assert with_columns_of(EXPECTED, found) == EXPECTED
