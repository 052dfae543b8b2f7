"""Checks that an installed nvprof-kit is complete; release checks run this script outside the source tree.

python installed.py [--extension | --pure]
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

import nvprof_kit


def main() -> None:
    """Fail with the first thing that is missing."""
    package = Path(nvprof_kit.__file__).parent
    assert nvprof_kit.__version__ == version("nvprof-kit")
    assert (package / "py.typed").exists()
    assert (nvprof_kit.recipes_folder() / "nsys" / "profile.sh").exists()
    found = [path.name for path in (package / "_instrument" / "ranges").glob("_ranges*.so")]
    if "--extension" in sys.argv:
        assert found, "no extension"
        from nvprof_kit._instrument.ranges import _ranges

        assert _ranges.__file__.startswith(str(package))
    if "--pure" in sys.argv:
        assert not found, found
    torch = "with torch" if importlib.util.find_spec("torch") else "without torch"
    print(f"nvprof-kit {nvprof_kit.__version__} in {package}: {found or 'pure Python'}, {torch}")


if __name__ == "__main__":
    main()
