"""Checks that an installed nvprof-kit is complete; release checks run this script outside the source tree."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import nvprof_kit


def main() -> None:
    """Fail with the first thing that is missing."""
    package = Path(nvprof_kit.__file__).parent
    assert nvprof_kit.__version__ == version("nvprof-kit")
    assert (package / "py.typed").exists()
    assert (nvprof_kit.recipes_folder() / "nsys" / "profile.sh").exists()
    libraries = [path.name for path in package.rglob("*.so")]
    assert not libraries, libraries
    torch = "with torch" if importlib.util.find_spec("torch") else "without torch"
    print(f"nvprof-kit {nvprof_kit.__version__} in {package}, {torch}")


if __name__ == "__main__":
    main()
