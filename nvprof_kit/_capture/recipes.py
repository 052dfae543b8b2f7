"""Location of the recipes: in the installed package, or next to it in a source tree."""

from __future__ import annotations

from pathlib import Path

from nvprof_kit.errors import ToolError


def recipes_folder() -> Path:
    """The folder of the shell recipes for nsys and ncu.

    Raises:
        ToolError: The recipes are not installed.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "nsys" / "profile.sh").exists():
            return folder
    raise ToolError(f"no recipes beside {package}; reinstall nvprof-kit")
