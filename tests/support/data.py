"""Where the tests' data lies."""

import lzma
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def unpacked(packed: str | Path, target: Path) -> Path:
    """Unpack a file, named by its path in `DATA`, to a path."""
    target.write_bytes(lzma.decompress((DATA / packed).read_bytes()))
    return target
