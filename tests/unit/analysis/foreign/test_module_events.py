"""Layers from module events of PyTorch traces, against an independent computation with sets and stacks.

On committed traces, and on those that others published where ``NVPROF_KIT_PUBLISHED`` names their folder.
"""

import gzip
import json
import lzma
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.data import DATA

import nvprof_kit

TRACES = [
    *(DATA / "foreign" / f"{name}.json.xz" for name in ("kineto-stack", "kineto-checkpoint")),
    *sorted(Path(os.environ.get("NVPROF_KIT_PUBLISHED", "/nonexistent")).glob("*.json.gz")),
]
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name)
def test_a_module_has_the_time_of_the_kernels_launched_in_it(trace):
    """Where the layers are from module events; graph replays and compiled models have theirs from elsewhere."""
    expected = {layer: time for layer, time in module_blocks(trace).items() if time}
    rows = nvprof_kit.open(trace).layers(steps="all", fold=False).rows
    forward = rows[rows["phase"] == "forward"].set_index("layer")["gpu_total_ns"]
    if not set(expected) & set(forward.index):
        pytest.skip("its layers are not from module events")
    assert {layer: forward.get(layer, 0) for layer in expected} == pytest.approx(expected, rel=0.03)


def module_blocks(path: Path) -> dict[str, int]:
    """GPU time in each module of a PyTorch trace that has siblings of its class, by the path of classes, in ns.

    A kernel belongs to the modules that are open when its launch begins, on its thread.
    """
    with (lzma if path.suffix == ".xz" else gzip).open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    launches = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    timeline: dict[Any, list[tuple[float, int, float, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "python_function" and event["name"].startswith("nn.Module: "):
            timeline[event["tid"]].append((event["ts"], 0, -event["dur"], event["name"][len("nn.Module: ") :]))
        elif event.get("cat") in _ON_GPU and (launch := launches.get(event["args"]["correlation"])):
            duration = round((event["ts"] + event["dur"]) * 1000) - round(event["ts"] * 1000)
            timeline[launch[0]].append((launch[1], 1, 0.0, duration))
    order: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    times: dict[tuple[str, ...], int] = defaultdict(int)
    for moments in timeline.values():
        open_modules: list[tuple[float, tuple[str, ...]]] = []
        for at, is_launch, length, what in sorted(moments, key=lambda moment: moment[:3]):
            while open_modules and open_modules[-1][0] <= at:
                open_modules.pop()
            if is_launch:
                for _, module in open_modules:
                    times[module] += what
                continue
            parent = open_modules[-1][1] if open_modules else ()
            order[parent][what] = None
            open_modules.append((at - length, (*parent, what)))
    blocks: dict[str, int] = defaultdict(int)
    inner = {name for parent, names in order.items() if parent for name in names}
    for module, time in times.items():
        if module[0] in inner:  # activation checkpointing runs a module again, outside the modules that hold it
            continue
        parts = []
        for depth, name in enumerate(module):
            kind = re.sub(r"_\d+$", "", name)
            alike = [other for other in order[module[:depth]] if re.sub(r"_\d+$", "", other) == kind]
            parts.append(f"{kind}.{alike.index(name)}" if len(alike) > 1 else kind)
        if re.search(r"\.\d+$", parts[-1]):
            blocks[".".join(parts)] += time
    return dict(blocks)
