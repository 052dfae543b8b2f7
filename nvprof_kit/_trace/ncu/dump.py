"""Print an ``.ncu-rep`` as JSON, one object per line and result: ``python -I dump.py FILE FOLDER_OF_NCU_REPORT``.

Runs in a separate process because the ncu-report and pyarrow libraries conflict: with pyarrow loaded first, reading a
metric crashes with a segmentation fault (ncu-report 2025.3.1, pyarrow 26.0).
"""

from __future__ import annotations

import json
import sys


def main(path: str, library: str) -> None:
    """Print all results of a report: name, metrics as [value, unit], and names of the push/pop ranges by domain,
    outermost first.

    Args:
        path: The report.
        library: The folder of ``ncu_report``; the standard library takes precedence.
    """
    sys.path.append(library)
    import ncu_report

    context = ncu_report.load_report(path)  # keep a reference: the context owns its results
    for number in range(context.num_ranges()):
        results = context.range_by_idx(number)
        for index in range(results.num_actions()):
            action = results.action_by_idx(index)
            metrics = {name: (action[name].value(), action[name].unit()) for name in action.metric_names()}
            state = action.nvtx_state()
            domains = [state.domain_by_id(domain) for domain in state.domains()] if state is not None else []
            result = {
                "kernel": action.name(action.NameBase_DEMANGLED),
                "metrics": {name: value for name, value in metrics.items() if isinstance(value[0], int | float | str)},
                "ranges": {domain.name(): [str(name) for name in domain.push_pop_ranges()] for domain in domains},
            }
            print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
