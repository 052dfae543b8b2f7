"""What older releases of PyTorch lack, or have under another name."""

import sys

import pytest
import torch

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])

try:
    from torch.distributed.tensor import DTensor, Shard, ones
except ImportError:  # before PyTorch 2.5
    from torch.distributed._tensor import DTensor, Shard, ones
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before PyTorch 2.6
    from torch.distributed._composable.fsdp import fully_shard

__all__ = ["EAGER", "RELEASE", "STACKS", "DTensor", "Shard", "fully_shard", "needs_torch", "ones"]


def needs_torch(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip the test with older releases of PyTorch, and say why."""
    return pytest.mark.skipif((major, minor) > RELEASE, reason=f"PyTorch {torch.__version__}: {reason}")


EAGER = pytest.param("eager", marks=needs_torch(2, 5, "the graph calls the modules of torch.nn, and so their hooks"))
"""The backend that runs the graph as it is."""

STACKS = pytest.mark.skipif(
    RELEASE < (2, 5) and sys.version_info >= (3, 12),
    reason=f"PyTorch {torch.__version__} with Python 3.12: names in a recording with stacks are no text",
)
"""For programs that import modules while stacks are recorded."""
