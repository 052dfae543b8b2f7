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

import pandas as pd

from nvprof_kit._trace.ncu.cells import DEFAULT_DOMAIN, base_unit
from nvprof_kit._trace.ncu.csv import read_csv
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.errors import CaptureError, ToolError


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
    ncu = os.environ.get("NCU") or shutil.which("ncu")
    if library is not None and library.origin is not None:
        # -I: the child ignores the current folder and PYTHONPATH for imports
        script = Path(__file__).with_name("dump.py").resolve()
        command = [sys.executable, "-I", str(script), str(path), str(Path(library.origin).parent)]
    elif ncu is not None:
        command = [ncu, "--import", str(path), "--page", "raw", "--csv", "--print-units", "base"]
    else:
        raise ToolError.of("no-ncu-reader", path=named)
    options: dict[str, Any] = {"text": True, "errors": "replace", "env": {**os.environ, "LC_ALL": "C"}}
    try:
        process = subprocess.run(command, capture_output=True, check=False, **options)
    except OSError as error:
        raise ToolError(f"{command[0]}: cannot run it: {error.strerror}") from None
    if process.returncode:
        message = ["crash", *(process.stderr or process.stdout).strip().splitlines()][-1]
        raise CaptureError(f"{named}: not a whole ncu report, or newer than its reader: {message[:300]}")
    if command[0] == ncu:
        return read_csv(process.stdout, domain, named)
    results = [json.loads(line) for line in process.stdout.splitlines()]
    if not results:
        raise CaptureError(f"{named}: no result in it: the report is damaged, or ncu measured no kernel")
    numbers: list[dict[str, float]] = []
    texts: list[dict[str, str]] = []
    units: dict[str, str] = {}
    for result in results:
        values = result["metrics"].items()
        texts.append({name: value for name, (value, _) in values if isinstance(value, str)})
        numeric = ((name, *metric) for name, metric in values if name not in texts[-1])
        numbers.append({name: value * base_unit(unit)[1] for name, value, unit in numeric})
        units = {name: base_unit(unit)[0] for name, (_, unit) in values} | units
    kernels = [_kernel(number, result, numbers[number], domain) for number, result in enumerate(results)]
    metrics = pd.DataFrame(numbers, index=range(len(results)), dtype="float64")
    return NcuReport(
        path=named,
        kernels=pd.DataFrame(kernels),
        metrics=metrics,
        texts=pd.DataFrame(texts, index=range(len(results))),
        units={name: units[name] for name in map(str, metrics)},
    )


def _kernel(number: int, result: dict[str, Any], metrics: dict[str, float], domain: str) -> dict[str, object]:
    """A row of `KERNELS`; the package tells neither process nor thread."""

    def joined(names: list[str], separator: str) -> str:
        values = [metrics.get(name) for name in names]
        return "" if None in values else separator.join(f"{value:.0f}" for value in values)

    grid, block = (joined([f"launch__{size}_dim_{axis}" for axis in "xyz"], ", ") for size in ("grid", "block"))
    return {
        "id": number,
        "pid": -1,
        "tid": -1,
        "kernel": result["kernel"],
        "grid": grid and f"({grid})",
        "block": block and f"({block})",
        "device": int(metrics.get("launch__device_id", -1)),
        "cc": joined([f"device__attribute_compute_capability_{level}" for level in ("major", "minor")], "."),
        "stack": tuple(result["ranges"].get(domain or DEFAULT_DOMAIN, ())),
    }
