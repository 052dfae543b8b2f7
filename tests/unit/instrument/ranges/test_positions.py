"""Where backward operators land, judged by a real Kineto trace: each belongs to the layer of its forward operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from model_zoo import ZOO, make

import nvprof_kit
from nvprof_kit import annotate_model
from nvprof_kit.names import parse_kineto_name, parse_range


class Event(NamedTuple):
    name: str
    thread: int
    start: float
    end: float
    args: dict[str, Any]


def record(subject: Any, path: Path, **options: Any) -> list[Event]:
    """One step under the profiler, after one that warms up."""
    subject.loss(subject.model).backward()
    with annotate_model(subject.model, steps=False, **options), nvprof_kit.record(path):
        subject.loss(subject.model).backward()
    events = json.loads(path.read_text())["traceEvents"]
    return [
        Event(event["name"], event["tid"], event["ts"], event["ts"] + event["dur"], event.get("args", {}))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]


def layer_at(ranges: list[Event], thread: int, moment: float) -> tuple[str, str]:
    """Path and phase of the innermost range of ours: the last begun of those that hold the moment."""
    holding = [range_ for range_ in ranges if range_.thread == thread and range_.start <= moment < range_.end]
    if not holding:
        return "(none)", ""
    text, category = parse_kineto_name(max(holding, key=lambda range_: range_.start).name)
    name = parse_range(text, category)
    return name.text, name.category.value


def judge(events: list[Event]) -> tuple[int, list[str]]:
    """How many backward operators there are, and those in another layer than their forward operator."""
    ranges = [event for event in events if parse_kineto_name(event.name)]
    forward: dict[int, Event] = {}
    for event in events:
        number = event.args.get("Sequence number", -1)
        if number >= 0 and not event.args.get("Fwd thread id") and not parse_kineto_name(event.name):
            latest = forward.get(number)
            if latest is None or event.start > latest.start:
                forward[number] = event
    wrong, total = [], 0
    for event in events:
        number = event.args.get("Sequence number", -1)
        if not event.args.get("Fwd thread id") or event.name.startswith("autograd::engine") or number not in forward:
            continue
        made = forward[number]
        layer, _ = layer_at(ranges, made.thread, made.start)
        found, phase = layer_at(ranges, event.thread, event.start)
        total += 1
        if (found, phase) != (layer, "backward" if layer != "(none)" else phase):
            wrong.append(f"{event.name} of {made.name}: {layer}, found in {found} {phase}")
    return total, wrong


@pytest.mark.parametrize("depth", [None, pytest.param(1, marks=pytest.mark.full), "leaf"])
@pytest.mark.parametrize("name", ZOO)
def test_backward_operators_land_in_the_layer_of_their_forward(name: str, depth: Any, tmp_path: Path) -> None:
    total, wrong = judge(record(make(name), tmp_path / "trace.json", depth=depth))
    assert total > 10
    assert not wrong, "\n".join(wrong)
