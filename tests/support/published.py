"""What captures that others published say of their blocks, computed from the files in SQL, sets and stacks."""

import gzip
import json
import lzma
import re
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

from support.data import unpacked

_SIDE = re.compile(r"FSDP::(pre|post)_forward \(([^)]*blocks\.\d+)")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def blocks_of(path: Path, copy: Path) -> dict[int, dict[str, tuple[int, int]]]:
    """GPU time in each whole block of FSDP, and from its first operation to its last, by process and block, in ns.

    Args:
        path: The packed capture.
        copy: Where to unpack it.
    """
    db = sqlite3.connect(unpacked(path, copy))
    texts = "SELECT globalTid, coalesce(text, value), start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId"
    sides: dict[tuple[int, str], dict[str, tuple[int, int]]] = defaultdict(dict)
    for thread, text, start, end in db.execute(texts):
        if side := _SIDE.match(text or ""):
            sides[thread, side[2]][side[1]] = (start, end)
    db.execute("CREATE TABLE block (thread, name, first, last)")
    whole = [(*key, of["pre"][0], of["post"][1]) for key, of in sides.items() if len(of) == 2]
    db.executemany("INSERT INTO block VALUES (?, ?, ?, ?)", whole)
    columns = "SELECT start, end, globalPid, correlationId FROM CUPTI_ACTIVITY_KIND"
    blocks: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    for pid, name, *times in db.execute(
        "SELECT thread >> 24, name, sum(op.end - op.start), max(op.end) - min(op.start) FROM block "
        "JOIN CUPTI_ACTIVITY_KIND_RUNTIME call ON globalTid = thread AND call.start >= first AND call.start < last "
        f"JOIN ({columns}_KERNEL UNION ALL {columns}_MEMCPY UNION ALL {columns}_MEMSET) op "
        "ON op.correlationId = call.correlationId AND globalPid >> 24 = thread >> 24 GROUP BY thread, name"
    ):
        blocks[pid][name] = (times[0], times[1])
    return blocks


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
