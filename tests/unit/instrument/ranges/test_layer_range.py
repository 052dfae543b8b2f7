"""`layer_range` on everything that can be called, resumed or entered."""

import asyncio
import inspect
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model, layer_range
from nvprof_kit.errors import UsageError
from nvprof_kit.names import Category


@layer_range
def pickled(x):
    return x + 1


def test_names_of_functions_and_scopes(sink):
    @layer_range
    def attend():
        with layer_range("inner"):
            pass

    @layer_range("decoder.3.mlp")
    def mlp():
        attend()

    class Block:
        @layer_range
        def forward(self):
            mlp()

        @layer_range(name=lambda _self, index: f"experts.{index}")
        def expert(self, index):
            return index

        @layer_range
        @staticmethod
        def still():
            return 1

        @classmethod
        @layer_range
        def inside(cls):
            return cls

        @layer_range
        @classmethod
        def outside(cls):
            return cls

    block = Block()
    block.forward()
    assert (block.expert(7), Block.still(), Block.inside(), block.outside()) == (7, 1, Block, Block)
    in_forward = ["  decoder.3.mlp", "    attend", "      inner"]
    others = ["experts.7", "Block.still", "Block.inside", "Block.outside"]
    assert sink.lines == ["Block.forward", *in_forward, *others]
    assert [range_.payload for range_ in sink.ranges[:3]] == [-1, 3, -1]
    assert {range_.category for range_ in sink.ranges} == {Category.FORWARD}


def test_every_kind_of_parameter_is_handed_on(sink):
    def function(a, b=2, /, c=3, *rest, d, e=5, **more):
        return a, b, c, rest, d, e, more

    for live in (False, True):
        session.activate(sink) if live else session.deactivate()
        wrapped = layer_range(function)
        assert wrapped(1, d=4) == function(1, d=4)
        assert wrapped(1, 9, 8, 7, 6, d=4, e=0, b=1) == function(1, 9, 8, 7, 6, d=4, e=0, b=1)
        with pytest.raises(TypeError, match="d"):
            wrapped(1)
    session.deactivate()
    assert layer_range(lambda x, /: x)(3) == 3
    assert layer_range(lambda *, x: x)(x=3) == 3
    assert layer_range(max)(3, 4) == 4


def test_a_wrapper_looks_like_what_it_wraps():
    def function(a: int, *, b: str = "x") -> None:
        """Says what it does."""

    async def coroutine():
        pass

    def generator():
        yield

    async def async_generator():
        yield

    wrapped = layer_range(function)
    assert inspect.signature(wrapped) == inspect.signature(function)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("function", "Says what it does.", function)
    assert inspect.iscoroutinefunction(layer_range(coroutine))
    assert asyncio.iscoroutinefunction(layer_range(coroutine))
    assert inspect.isgeneratorfunction(layer_range(generator))
    with pytest.raises(UsageError, match="an asynchronous generator; decorate what it awaits"):
        layer_range(async_generator)
    assert pickle.loads(pickle.dumps(pickled)) is pickled


def test_an_exception_closes_the_range_and_what_leaked_inside(sink):
    @layer_range
    def raises():
        sink.open(sink.ranges[0], None)  # left open
        raise KeyError("x")

    with layer_range("outer"):
        with pytest.raises(KeyError):
            raises()
        assert sink.open_count() == 1


def test_scopes_nest_in_themselves_and_are_reusable(sink):
    scope = layer_range("layers.0")
    with scope, scope:
        pass
    with scope:
        pass
    assert sink.lines == ["layers.0", "  layers.0", "layers.0"]


def test_generator_is_ranged_per_resume_and_forwards_everything(sink):
    closed = []

    @layer_range("producer")
    def produce(first):
        try:
            got = yield first
            try:
                yield got
            except ValueError as error:
                yield str(error)
            return "done"
        finally:
            closed.append(True)

    def consume():
        return (yield from produce(1))

    consumer = consume()
    assert next(consumer) == 1
    with layer_range("between"):
        assert consumer.send(2) == 2
    assert consumer.throw(ValueError("three")) == "three"
    with pytest.raises(StopIteration) as stopped:
        next(consumer)
    assert stopped.value.value == "done"
    assert sink.lines == ["producer", "between", "  producer", "producer", "producer"]

    half = produce(1)
    next(half)
    half.close()
    assert closed == [True, True]


def test_coroutines_are_ranged_per_resume(sink):
    @layer_range
    async def work(name, steps):
        for _ in range(steps):
            await asyncio.sleep(0)
        return name

    async def both():
        return await asyncio.gather(work("a", 2), work("b", 1))

    assert asyncio.run(both()) == ["a", "b"]
    name = f"{work.__name__}"
    assert sink.lines == [name] * 5  # three resumes of a, two of b: never one inside the other


def test_module_class_numbers_its_instances(sink):
    @layer_range
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, **_names):
            return self.linear(x)

    first, second = Block(), Block()
    second(first(torch.ones(2, 4), module=1)).sum().backward()
    assert sink.lines == ["Block.0", "Block.1", "Block.1 backward", "Block.0 backward"]
    with pytest.raises(UsageError, match=r"only nn.Module classes"):
        layer_range(type("Plain", (), {}))


def test_calls_without_tensors_among_the_arguments_are_followed_all_the_same(sink):
    weight = torch.ones(3, requires_grad=True)

    @layer_range
    def inner(x):
        return x * weight

    @layer_range
    def count(n):
        return n + 1

    @layer_range
    def outer(n):
        before = weight.exp() * count(n)
        return inner(before).sin() if n else None

    assert outer(0) is None
    del sink.lines[:]
    outer(1).sum().backward()
    assert sink.lines == ["outer", "  count", "  inner", "outer backward", "  inner backward"]

    with torch.no_grad():
        outer(1)
    assert sink.thread.position.owners == []


def test_a_call_during_which_the_tool_goes_is_closed_once(sink):
    @layer_range
    def work():
        session.deactivate()
        assert sink.open_count() == 0
        session.activate(sink)
        return 1

    assert work() == 1


def test_off_returns_the_function_itself(monkeypatch):
    def function(): ...

    monkeypatch.setattr(session, "mode", "off")
    assert layer_range(function) is function and layer_range("x")(function) is function
    annotate_model(model := nn.Linear(2, 2))
    session.activate(session.Kineto())
    assert session.backend is None and "_compiled_call_impl" not in vars(model)


def test_category(sink):
    with layer_range("all_reduce", category="comm"):
        pass
    assert sink.ranges[0].category is Category.COMM
    with pytest.raises(UsageError, match="'colour' is not a category"):
        layer_range("x", category="colour")


class Block:
    def bare(self, x, mask=None, *, scale=1.0):
        return x

    decorated = layer_range(bare)


def calls(run: Callable[[], object]) -> int:
    """How many functions, of Python and of C, a call enters."""
    seen = []
    sys.setprofile(lambda _frame, event, _argument: seen.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen)


@pytest.mark.parametrize("annotated_before", [False, True])
def test_an_idle_call_enters_the_function_and_its_wrapper_alone(annotated_before, sink):
    if annotated_before:
        Block().decorated(1)
    session.deactivate()
    block = Block()
    function = layer_range(lambda x, y=1: x)
    bare = calls(lambda: block.bare(1, scale=2.0))
    assert calls(lambda: block.decorated(1, scale=2.0)) <= bare + 1
    assert calls(lambda: function(1)) <= bare + 1
