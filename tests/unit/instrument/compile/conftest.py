"""Each test has a compiler that has compiled nothing, and soon gives up to compile anew."""

import warnings
from collections.abc import Iterator

import pytest
import torch._dynamo as dynamo
from compiled_models import LIMIT
from torch._dynamo.utils import counters


@pytest.fixture
def limit() -> int:
    """So often one function is compiled anew."""
    return LIMIT


@pytest.fixture(autouse=True)
def fresh(limit: int) -> Iterator[None]:
    name = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.6
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch({name: limit}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.compile compiles")
        yield
    dynamo.reset()
