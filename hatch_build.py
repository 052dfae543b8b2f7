"""Build the extension in C where a compiler and Python's headers are at hand; without it Python does its work.

``python hatch_build.py`` builds it in place, for programs that use the package from its source tree.

NVPROF_KIT_EXTENSION in the environment is ``auto`` (the default), ``required``, with which a wheel without it is an
error, or ``none``, which makes the wheel for every Python and machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PLACE = Path("nvprof_kit", "_instrument", "ranges")
ROOT = Path(__file__).resolve().parent
CHOICES = ("auto", "required", "none")


def build(folder: Path) -> Path | None:
    """Build the extension into a folder; None where it is not wanted, or cannot be built, with the reason on stderr."""
    wanted = os.environ.get("NVPROF_KIT_EXTENSION") or "auto"
    if wanted not in CHOICES:
        raise SystemExit(f"NVPROF_KIT_EXTENSION is {wanted!r}; needed one of {', '.join(CHOICES)}")
    library = None if wanted == "none" else _build(folder)
    if library is None and wanted == "required":
        raise SystemExit("nvprof-kit: no extension, and NVPROF_KIT_EXTENSION=required asks for it")
    return library


def _build(folder: Path) -> Path | None:
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        print("nvprof-kit: ranges are emitted by Python, as this is no CPython with a GIL", file=sys.stderr)
        return None
    library = folder / f"_ranges{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{sysconfig.get_paths()['include']}"]
    source = str(ROOT / PLACE / "ranges_c" / "extension.c")
    try:
        # written beside and then moved: a program that runs with an earlier build keeps that
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            built = Path(beside, library.name)
            asked = shlex.split(os.environ.get("CFLAGS", ""))
            command = [*_compiler(), *flags, *asked, source, "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            built.replace(library)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        print(f"nvprof-kit: ranges are emitted by Python, a little slower:\n{reason.strip()}", file=sys.stderr)
        with contextlib.suppress(OSError):
            library.unlink()  # it is of an earlier source
        return None
    return library


def _compiler() -> list[str]:
    named = (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang")
    commands = (shlex.split(name) for name in named if name)
    return next((command for command in commands if command and shutil.which(command[0])), ["cc"])


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    pass
else:

    class Extension(BuildHookInterface[Any]):
        """Adds the extension to a wheel, and to the source tree of an editable install."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build it before the wheel is put together."""
            if version == "editable":
                build(ROOT / PLACE)
                return
            self._folder = tempfile.TemporaryDirectory()
            library = build(Path(self._folder.name))
            if library is not None:
                build_data["force_include"][str(library)] = str(PLACE / library.name)
                build_data["pure_python"] = False
                build_data["infer_tag"] = True

        def finalize(self, version: str, _build_data: dict[str, Any], _artifact: str) -> None:
            """Remove what was built for the wheel."""
            if version != "editable":
                self._folder.cleanup()


if __name__ == "__main__":
    sys.exit(build(ROOT / PLACE) is None)
