"""Each test has a compiler that has compiled nothing."""

import warnings
from collections.abc import Iterator

import pytest
from compiled_models import LIMIT, fresh_compiler


@pytest.fixture
def limit() -> int:
    """So often one function is compiled anew."""
    return LIMIT


@pytest.fixture(autouse=True)
def fresh(limit: int) -> Iterator[None]:
    with fresh_compiler(limit), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.compile compiles")
        yield
