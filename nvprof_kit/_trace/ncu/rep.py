"""Read an ``.ncu-rep`` with NVIDIA's ncu-report package, or as CSV from an installed ncu."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from nvprof_kit._trace.ncu.cells import DEFAULT_DOMAIN, base_unit
from nvprof_kit._trace.ncu.csv import read_csv
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.errors import CaptureError, ToolError

_DIMENSIONS = ("x", "y", "z")


def read_rep(path: Path, domain: str, named: str) -> NcuReport:
    """Read an ``.ncu-rep``.

    Args:
        path: The report.
        domain: NVTX domain to take the ranges from; '' is the default domain.
        named: The path to name in messages.

    Raises:
        CaptureError: The report is damaged, newer than the reader, or contains no result.
        ToolError: Neither the ncu-report package nor ncu is installed.
    """
    library = importlib.util.find_spec("ncu_report")
    if library is None or library.origin is None:
        return _printed(path, domain, named)
    # -I: the child ignores the current folder and PYTHONPATH for imports
    script = Path(__file__).with_name("dump.py").resolve()
    command = [sys.executable, "-I", str(script), str(path), str(Path(library.origin).parent)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if process.returncode:
        message = process.stderr.strip().splitlines()
        raise CaptureError(
            f"{named}: not a whole ncu report, or newer than ncu-report: {message[-1] if message else 'crash'}"
        )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    if not results:
        raise CaptureError(f"{named}: no result in it: the report is damaged, or ncu measured no kernel")
    import pandas as pd

    numbers: list[dict[str, float]] = []
    texts: list[dict[str, str]] = []
    units: dict[str, str] = {}
    for result in results:
        numbers.append({})
        texts.append({})
        for name, (value, unit) in result["metrics"].items():
            if isinstance(value, (int, float)):
                base, factor = base_unit(unit)
                numbers[-1][name] = value * factor
                units.setdefault(name, base)
            elif value is not None:
                texts[-1][name] = str(value)
    kernels = [_kernel(number, result, numbers[number], domain) for number, result in enumerate(results)]
    metrics = pd.DataFrame(numbers, index=range(len(results)), dtype="float64")
    return NcuReport(
        path=named,
        kernels=pd.DataFrame(kernels),
        metrics=metrics,
        texts=pd.DataFrame(texts, index=range(len(results))),
        units={name: units[name] for name in metrics},
    )


def _printed(path: Path, domain: str, named: str) -> NcuReport:
    """Read the report with an installed ncu."""
    ncu = os.environ.get("NCU") or shutil.which("ncu")
    if ncu is None:
        raise ToolError(
            f"{named}: reading an .ncu-rep needs the ncu-report package, or ncu on PATH; "
            'install it with: pip install "nvprof-kit[ncu]"'
        )
    command = [ncu, "--import", str(path), "--page", "raw", "--csv", "--print-units", "base"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}, errors="replace"
        )
    except OSError as error:
        raise ToolError(f"{ncu}: cannot run it: {error.strerror}") from None
    if process.returncode:
        message = " ".join((process.stderr or process.stdout).split())
        raise ToolError(f"{named}: {ncu} cannot print it: {message[:300]}")
    return read_csv(process.stdout, domain, named)


def _kernel(number: int, result: dict[str, Any], metrics: dict[str, float], domain: str) -> dict[str, object]:
    major, minor = (
        metrics.get(f"device__attribute_compute_capability_{version_part}") for version_part in ("major", "minor")
    )
    ranges: dict[str, list[str]] = result["ranges"]
    return {
        "id": number,
        "pid": -1,
        "tid": -1,
        "kernel": result["kernel"],
        "grid": _size(metrics, "grid"),
        "block": _size(metrics, "block"),
        "device": int(metrics.get("launch__device_id", -1)),
        "cc": f"{major:.0f}.{minor:.0f}" if major is not None and minor is not None else "",
        "stack": tuple(ranges.get(domain or DEFAULT_DOMAIN, ())),
    }


def _size(metrics: dict[str, float], axis: str) -> str:
    values = [metrics.get(f"launch__{axis}_dim_{dimension}") for dimension in _DIMENSIONS]
    return "" if None in values else f"({', '.join(f'{value:.0f}' for value in values)})"
