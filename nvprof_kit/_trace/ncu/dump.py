"""Prints an ``.ncu-rep`` as json, one object a line for each result: ``python -I dump.py FILE FOLDER_OF_NCU_REPORT``.

A process of its own, since the library of ncu-report and that of pyarrow do not bear each other: with pyarrow loaded
first, reading a metric ends in a segmentation fault (ncu-report 2025.3.1, pyarrow 26.0).
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(path: str, library: str) -> None:
    """Print every result of a report: its name, its metrics as [value, unit], and its NVTX ranges by domain.

    Args:
        path: The report.
        library: The folder that ``ncu_report`` lies in; the standard library comes before it.
    """
    sys.path.append(library)
    import ncu_report

    context = ncu_report.load_report(path)  # it owns its results: they live no longer than it does
    for number in range(context.num_ranges()):
        results = context.range_by_idx(number)
        for index in range(results.num_actions()):
            action = results.action_by_idx(index)
            print(json.dumps(_result(action)))


def _result(action: Any) -> dict[str, Any]:
    metrics = {name: action[name] for name in action.metric_names()}
    return {
        "kernel": action.name(action.NameBase_DEMANGLED),
        "metrics": {name: [metric.value(), metric.unit()] for name, metric in metrics.items()},
        "ranges": _ranges(action.nvtx_state()),
    }


def _ranges(state: Any) -> dict[str, list[str]]:
    """Names of the push/pop ranges by domain, outermost first."""
    if state is None:
        return {}
    domains = [state.domain_by_id(number) for number in state.domains()]
    return {domain.name(): [str(name) for name in domain.push_pop_ranges()] for domain in domains}


if __name__ == "__main__":
    main(*sys.argv[1:])
