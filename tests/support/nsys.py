"""A real Nsight Systems that a test runs by itself, not through the product."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_nsys(
    nsys: str, verb: str, *argv: str | Path, cwd: Path | None = None, attempts: int = 3, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb of nsys to its end, with this tree on Python's path.

    nsys fails by itself in a few of some thousand runs, so it runs again where it does; `profile` and `export` then
    overwrite what the first run left.

    Raises:
        AssertionError: nsys failed each time. Holds the end of what the last run printed.
    """
    command = [nsys, verb, *(["--force-overwrite=true"] if verb in ("profile", "export") else []), *map(str, argv)]
    paths = [os.environ.get("PYTHONPATH", ""), environ.pop("PYTHONPATH", ""), str(ROOT)]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for _ in range(attempts):
        ended = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=300,
        )
        if ended.returncode == 0:
            return ended
    raise AssertionError(f"{command} ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
