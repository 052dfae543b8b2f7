"""Any program leaves its threads' ranges balanced, and a backward pass runs each node in the layers that made it."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.cli import execute
from support.lane import examples
from support.model_zoo import ZOO, make
from support.ranges import programs

import nvprof_kit
from nvprof_kit import annotate_model, layer_range
from nvprof_kit.names import parse_kineto_name, parse_range


def statement(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), *arguments).map(list)


names, indices = st.sampled_from("abc"), st.integers(-3, 2)

simple = st.one_of(
    statement("operation", st.sampled_from(list(programs.OPERATIONS)), indices, indices),
    statement("module", st.integers(0, 2), indices, st.sampled_from([False, False, True])),
    statement("checkpoint", st.integers(0, 2), indices, st.booleans()),
    statement("backward", indices, st.booleans(), st.booleans()),
    statement("grad", st.lists(indices, max_size=3)),
    statement("hook_fails", indices),
    statement("switch", st.sampled_from([False, False, True])),
    statement("raise"),
)


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, max_size=4)
    endings = st.sampled_from(["throw", "close", "drop"])
    return st.one_of(
        *(statement(name, names, body) for name in ("with", "phase", "coroutine", "start")),
        *(statement("call", names, body, indices, st.sampled_from(list(programs.RESULTS))) for _ in range(2)),
        statement("generator", names, st.lists(body, max_size=3), st.integers(0, 4), endings),
        *(statement(name, body) for name in ("thread", "no_grad", "try")),
    )


def check_balance(program: list[Any]) -> None:
    """Each thread opens one deeper than it is and closes where it is; at the end nothing is open."""
    log, left = programs.run(program)
    assert left == []
    depths: Counter[str] = Counter()
    for thread, depth, text in (event for event in log if isinstance(event, list | tuple)):
        assert depth == depths[thread] + (text is not None)
        depths[thread] += 1 if text is not None else -1
    assert not any(depths.values())


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.recursive(simple, around, max_leaves=15), min_size=1, max_size=5))
def test_any_program_is_balanced(program):
    check_balance(program)


def test_a_program_that_does_everything_is_balanced():
    check_balance(programs.EVERYTHING)


@pytest.mark.slow
def test_nothing_is_left_behind():
    """In a process of its own, whose objects and memory are those of the programs alone."""
    assert len(programs.run(programs.EVERYTHING)[0]) > 50
    run = (
        "import gc, json; from support.ranges import programs as p; gc.freeze(); "
        "print(json.dumps(p.leaks(p.EVERYTHING, 20)))"
    )
    done = execute(sys.executable, "-c", run, check=True, PYTHONPATH=os.pathsep.join(sys.path))
    leaked = json.loads(done.stdout)
    assert leaked["objects"] < 10, leaked  # a leak of one object a run would be 20
    assert leaked["bytes"] < 4 << 20, leaked


class Probe(torch.autograd.Function):
    """A sum of two tensors whose node keeps the layers that were open when it was made, and those of its backward."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, calls: list[str], sink: Any, seen: Any) -> Any:
        ctx.made_in, ctx.sink, ctx.seen = list(calls), sink, seen
        return left + right

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append((ctx.made_in, [range_.text.removesuffix(" backward") for range_ in ctx.sink.open_ranges()]))
        return grad, grad, None, None, None


calls_of_layers = st.recursive(
    st.tuples(st.just("node"), indices, indices),
    lambda inner: st.tuples(st.just("call"), indices, indices, st.lists(inner, min_size=1, max_size=4), st.booleans()),
    max_leaves=12,
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls_of_layers, min_size=1, max_size=4), st.booleans())
@example([("node", 0, 0), ("node", 0, 0), ("call", -1, -1, [("node", 0, 0)], True), ("node", 2, -1)], True)
def test_a_node_runs_backward_in_the_calls_that_made_it(sink, program, in_a_model):
    """Random layers in layers, with skip connections over any of them, by arguments; each returns what it made last,
    and some detach their arguments.

    Of nodes outside all layers nothing is asked: one from before a layer that only nodes after it use runs in it.
    """
    calls: list[str] = []
    seen: list[tuple[list[str], list[str]]] = []
    numbers = iter(range(1000))

    def run(statements: list[Any], tensors: list[torch.Tensor]) -> torch.Tensor:
        for name, *arguments in statements:
            left, right = (tensors[index % len(tensors)] for index in arguments[:2])
            if name == "node":
                tensors.append(Probe.apply(left, right, calls, sink, seen))
                continue
            layer = f"layer {next(numbers)}"

            def call(*inputs: torch.Tensor, body: Any = arguments[2:], layer: str = layer) -> torch.Tensor:
                calls.append(layer)
                statements, detaches = body
                made = run(statements, [x.detach().requires_grad_() if detaches else x for x in inputs])
                calls.pop()
                return made

            tensors.append(layer_range(layer)(call)(left, right))
        return tensors[-1]

    program = [("call", 0, 0, program, False)] if in_a_model else program
    run(program, [torch.ones(1, requires_grad=True)]).backward()
    assert all(made_in == ran_in for made_in, ran_in in seen if made_in), seen


@pytest.mark.parametrize("depth", [1, 70])  # the engine moves to a thread of its own below a depth of 60
def test_a_call_inside_backward_passes_is_a_recompute(depth, sink):
    @layer_range("layer")
    def layer(x: torch.Tensor) -> None: ...

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, left: int) -> torch.Tensor:
            ctx.left = left
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            layer(grad)
            if ctx.left > 1:
                with torch.enable_grad():
                    Again.apply(torch.ones(1, requires_grad=True), ctx.left - 1).backward()
            return grad, None

    x = torch.ones(1, requires_grad=True)
    layer(x)
    Again.apply(x, depth).backward()
    layer(x)
    assert sink.lines == ["layer", *["layer recompute"] * depth, "layer"]
    assert len(sink.threads) == (1 if depth == 1 else 2)


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
def test_backward_operators_land_in_the_layer_of_their_forward(name, depth, tmp_path):
    total, wrong = judge(record(make(name), tmp_path / "trace.json", depth=depth))
    assert total > 10
    assert not wrong, "\n".join(wrong)
