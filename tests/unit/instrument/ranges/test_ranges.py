"""Ranges in Python and in C do the same, in a world without torch; what C adds is that nothing may crash or leak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.ranges.twins import Node, Parameter, Tensor, World, grad_nodes

from nvprof_kit._instrument.ranges import ranges, ranges_python

ROOT = Path(__file__).parents[4]


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension, built for these tests from today's source; not the one that the package uses."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    library = load("hatch_build", ROOT / "hatch_build.py").build(tmp_path_factory.mktemp("built"))
    assert library is not None
    return load("_ranges", library)


@pytest.fixture(params=["python", "c"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Both worlds, one after the other; the test's tool must be back at depth 0 at the end."""
    if request.param == "c":
        twin = request.getfixturevalue("built")
        yield World(twin)
        twin.switch(None)
        return
    before = vars(ranges_python.now).copy()
    yield World(ranges_python)
    vars(ranges_python.now).update(before)


def test_they_offer_the_same(built) -> None:
    wanted = ["INTERFACE", "OUTSIDE", "Block", "Frame", "Position", "Range", "ask", "follow", "ranged", "switch"]
    assert all(hasattr(twin, name) for twin in (built, ranges_python) for name in wanted)
    assert built.INTERFACE == ranges_python.INTERFACE


def test_without_a_compiler_there_is_a_reason_and_no_library(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / f"_ranges{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("of an earlier source")
    monkeypatch.setenv("CC", "false")
    assert load("hatch_build", ROOT / "hatch_build.py").build(tmp_path) is None
    assert "ranges are emitted by Python" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compiler", [" ", "'", "no-such-compiler"])
def test_a_broken_name_of_a_compiler_breaks_no_install(compiler: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CC", compiler)
    load("hatch_build", ROOT / "hatch_build.py").build(tmp_path)


def test_a_folder_that_cannot_be_written_breaks_no_install(capfd) -> None:
    assert load("hatch_build", ROOT / "hatch_build.py").build(Path("/proc/self")) is None
    assert "ranges are emitted by Python" in capfd.readouterr().err


@pytest.mark.parametrize("chosen", ["", "0", "1"])
def test_the_environment_can_choose_python(chosen: str) -> None:
    program = "from nvprof_kit._instrument.ranges import ranges; print(ranges.compiled)"
    environ = {**os.environ, "NVPROF_KIT_PURE_PYTHON": chosen, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ranges.compiled and chosen != "1")


def test_blocks_nest_and_exceptions_close_them(world) -> None:
    outer, inner = world.block("outer"), world.block("inner")
    with outer:
        with pytest.raises(KeyboardInterrupt), inner:
            world.tool.open(world.twin.Range("left open", "user"), object())
            raise KeyboardInterrupt
        with outer, inner:
            pass
    assert world.tool.log == ["outer", "  inner", "    left open", "  outer", "    inner"]
    assert world.tool.depth == 0
    assert world.tool.thread.position.owners == []


def test_a_call_takes_and_gives_what_the_function_does(world) -> None:
    def function(a, b=2, *rest, c, **more):
        return a, b, rest, c, more

    call = world.twin.ranged(function, world.block("call"))
    assert call(1, c=3) == function(1, c=3)
    assert call(1, 5, 6, c=3, d=(4, [call])) == function(1, 5, 6, c=3, d=(4, [call]))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call(c=1)
    assert world.tool.log == ["call"] * 3
    assert world.tool.depth == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_tool_that_goes_in_the_middle(again: bool, world) -> None:
    def function():
        world.tool.thread.position.close_all(world.tool.pop)
        world.twin.switch(None)
        if again:
            world.twin.switch(world.tool)
        return 1

    assert world.twin.ranged(function, world.block("call"))() == 1
    assert world.tool.depth == 0
    world.twin.switch(None)
    with world.block("unseen") as block:
        assert block.begin((), {}) is False
        assert block.end(None) is None
    assert world.tool.log == ["call"]


@pytest.mark.parametrize("way", ["with", "call"])
def test_a_range_that_cannot_be_opened_raises_and_leaves_nothing_open(way: str, world) -> None:
    block = world.block("broken")
    world.tool.fails = "broken"
    with pytest.raises(OSError, match="broken"):
        if way == "call":
            world.twin.ranged(print, block)()
        else:
            with block:
                pass
    assert world.tool.thread.position.owners == []


def test_an_error_while_following_closes_the_range_and_comes_through(world) -> None:
    def broken(_values: list[Any]) -> list[Any]:
        raise LookupError

    world.twin.follow(lambda: None, broken, set(), Tensor, Tensor)
    with pytest.raises(LookupError):
        world.twin.ranged(lambda x: x, world.block("call"))([1])

    def fails() -> None:
        world.sequence += 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        world.twin.ranged(fails, world.block("call"))()
    assert world.tool.depth == 0


def test_backward_runs_through_the_calls(world) -> None:
    twin, block = world.twin, world.block
    norm = twin.ranged(world.operator, block("norm"))
    mlp = twin.ranged(lambda x: world.operator(world.operator(x)), block("mlp"))

    def layer(x: Tensor) -> Tensor:
        return world.operator(x, mlp(norm(x)))

    result = twin.ranged(lambda x: twin.ranged(layer, block("layer"))(world.operator(x)), block("model"))(Tensor())
    world.tool.log.clear()
    world.backward(result)
    assert world.tool.log == [
        *("model backward", "  layer backward", "    node 5"),
        *("    mlp backward", "      node 4", "      node 3", "    norm backward", "      node 2", "  node 1"),
    ]


def test_a_recompute_has_its_own_name(world) -> None:
    block = world.block("layer")
    world.task = 3
    with block:
        world.twin.ranged(lambda: None, block)()
    assert world.tool.log == ["layer recompute", "  layer recompute"]


class Program:
    """A program made up from a seed: calls in calls, with operators, views, errors and ranges left open."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.blocks = [world.block(f"b{index}", backward=index != 3) for index in range(5)]
        self.known = [Tensor(), Tensor()]

    def run(self) -> list[str]:
        for _ in range(4):
            self.stretch(0)
        self.world.backward(self.known[-1])
        return self.world.tool.log

    def stretch(self, depth: int) -> None:
        for _ in range(self.random.randrange(1, 5)):
            what = self.random.random()
            inputs = self.random.sample(self.known, k=min(2, len(self.known)))
            if what < 0.4 or depth > 4:
                made = self.world.operator(*inputs)
                self.known += [made, Tensor(made.grad_fn, self.random.choice(inputs))]
            elif what < 0.5:
                self.world.tool.open(self.world.twin.Range("left", "user"), object())
            elif what < 0.6:
                with self.random.choice(self.blocks):
                    self.stretch(depth + 1)
            else:
                self.call(depth, inputs)

    def call(self, depth: int, inputs: list[Tensor]) -> None:
        fails = self.random.random() < 0.1
        self.world.grad = self.random.random() < 0.9

        def function(*_args: Any, **_kwargs: Any) -> Any:
            self.world.grad = True
            self.stretch(depth + 1)
            if fails:
                raise ValueError
            return self.random.choice([None, 3, inputs, (self.known[-1], 3), self.known[-1], self.known[0]])

        arguments = self.random.choice([[], inputs, [tuple(inputs), 3], [inputs]])
        ranged = self.world.twin.ranged(function, self.random.choice(self.blocks))
        with contextlib.suppress(ValueError):
            self.known += [x for x in [ranged(*arguments, last=self.known[-1])] if isinstance(x, Tensor)]


def test_programs_run_alike(built) -> None:
    before = vars(ranges_python.now).copy()
    try:
        for seed in range(400):
            logs = [Program(World(twin), seed).run() for twin in (ranges_python, built)]
            assert logs[0] == logs[1], f"seed {seed}"
            assert any("backward" in line for line in logs[0]) or len(logs[0]) < 200
    finally:
        vars(ranges_python.now).update(before)
        built.switch(None)


def test_threads_have_their_own(world) -> None:
    barrier = threading.Barrier(3)
    block = world.block("thread")

    def work() -> None:
        with block:
            barrier.wait()
            assert world.tool.thread.position.owners == [block]
            barrier.wait()

    for _ in range(3):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert world.tool.thread.position.owners == []
    assert len(world.tool.log) == 9


def test_calls_nested_by_the_hundred(world) -> None:
    # before 3.12.3, Python 3.12 allows 1,500 nested entries from C whatever the limit; a call takes four
    depth = 300 if (3, 12) <= sys.version_info < (3, 12, 3) else 400
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    block = world.block("deep")

    def deep(x: Tensor, depth: int) -> Tensor:
        return ranged(world.operator(x), depth - 1) if depth else x

    ranged = world.twin.ranged(deep, block)
    try:
        result = ranged(world.operator(Tensor()), depth)
        world.tool.log.clear()
        world.backward(result)
        assert world.tool.log.count("  " * (depth - 1) + "deep backward") == 1
        del result
        world.nodes.clear()
        gc.collect()
    finally:
        sys.setrecursionlimit(limit)


def test_nothing_stays_alive(world) -> None:
    class Callee:
        def __call__(self, x: Tensor) -> Tensor:
            return world.operator(x, x)

    def run() -> list[weakref.ref[Any]]:
        callee, argument = Callee(), Tensor()
        callee.itself = world.twin.ranged(callee, world.block("call"))  # type: ignore[attr-defined]
        result = callee.itself(argument)  # type: ignore[attr-defined]
        world.backward(result)
        return [weakref.ref(thing) for thing in (callee, argument, result, result.grad_fn)]

    seen = run()
    world.nodes.clear()
    gc.collect()
    assert [thing() for thing in seen] == [None] * 4


@pytest.mark.slow
def test_counts_of_references_stay(world) -> None:
    block, tensor, failing = world.block("call"), world.operator(Tensor()), world.block("fails")
    call = world.twin.ranged(lambda *x, **y: world.operator(tensor), block)
    world.tool.fails = "fails"
    position = world.tool.thread.position

    def rounds() -> None:
        for _ in range(200):
            call(tensor, (tensor, [tensor]), last=tensor)
            with block:
                position.close(block, world.tool.pop)
            with contextlib.suppress(OSError):
                world.twin.ranged(call, failing)(tensor)
            tensor.grad_fn.hooks.clear()
            world.nodes.clear()

    watched = [
        block,
        block.range,
        tensor,
        tensor.grad_fn,
        call,
        world.tool,
        position,
        failing,
        None,
        world.twin.OUTSIDE,
    ]

    def counts() -> list[int]:
        rounds()
        gc.collect()
        return [sys.getrefcount(thing) for thing in watched]

    counts()
    before, after = counts(), counts()  # what stays once a round would be 200; others use None, too
    assert all(abs(now - then) < 100 for now, then in zip(after, before, strict=True)), (before, after)


def _broken_uses(twin: ModuleType) -> list[Callable[[], Any]]:
    block = twin.Block(twin.Range("x", "forward"))
    empty, swapped = twin.Block.__new__(twin.Block), twin.Block(twin.Range("x", "forward"))
    swapped.range = "no range"

    def enter(block: Any) -> None:
        with block:
            pass

    return [
        twin.Range,
        lambda: twin.Block("no range"),
        lambda: twin.ranged(print, "no block"),
        twin.ranged(print, empty),
        lambda: enter(empty),
        lambda: enter(swapped),
        lambda: block.begin(1, 2),
        lambda: block.begin(()),
        lambda: twin.Position().close(1),
        lambda: setattr(twin.Position(), "at", None),
        lambda: delattr(twin.Position(), "at"),
        twin.Frame,
        lambda: twin.switch(3),
        lambda: twin.ask(1),
        lambda: twin.follow(1, 2, 3, 4, 5),
    ]


def test_what_the_compiler_inlines_is_the_function(built) -> None:
    """torch.compile looks for ``__call__`` in the type and traces it; Python calls through the type's slots."""
    world = World(built)
    call = built.ranged(lambda a, *, b: (a, b), world.block("call"))
    assert type(call).__call__(call, 1, b=2) == (1, 2)
    assert world.tool.log == []
    assert call(1, b=2) == (1, 2)
    assert world.tool.log == ["call"]
    built.switch(None)


def test_types_without_tensors_are_those_of_the_last_set(world) -> None:
    class Holder:
        pass

    seen: list[Any] = []

    def nodes(values: list[Any]) -> list[Any]:
        seen.extend(value for value in values if isinstance(value, Holder))
        return []

    call = world.twin.ranged(lambda _holder: None, world.block("call"))
    world.twin.follow(lambda: None, nodes, {int, Holder}, Tensor, Parameter)
    call(Holder())
    seen.clear()  # Python's twin keeps no set: it asks each time
    world.twin.follow(lambda: None, nodes, {int}, Tensor, Parameter)
    call(Holder())
    assert len(seen) == 1


@pytest.mark.parametrize("index", range(15))
def test_wrong_use_of_c_raises(index: int, built) -> None:
    World(built)
    try:
        with pytest.raises((TypeError, AttributeError, RuntimeError)):
            _broken_uses(built)[index]()
    finally:
        built.switch(None)


def test_what_a_thread_is_at_may_be_replaced_by_another(world) -> None:
    """What the block found when it was entered is gone when it is left, on a thread that had no part in it."""

    class Shared:
        position = world.twin.Position()

    world.tool.thread = Shared()
    world.twin.switch(world.tool)
    block = world.block("block")

    def replace() -> None:
        world.tool.thread.position = world.twin.Position()

    with block:
        thread = threading.Thread(target=replace)
        thread.start()
        thread.join()
        filler = [world.twin.Position() for _ in range(100)]  # where the first one was
        assert world.tool.thread.position.owners == []
        with block:
            assert len(world.tool.thread.position.owners) == 1
    assert world.tool.thread.position.owners == []
    assert not any(position.owners for position in filler)


def test_everything_may_change_while_others_use_it(world) -> None:
    """Threads begin and end calls while one replaces the tool, where threads are, and what answers their questions."""
    twin, tool = world.twin, world.tool
    stop, errors = threading.Event(), []

    class Shared:
        def __init__(self) -> None:
            self.position = twin.Position()

    class Quiet:
        def __init__(self) -> None:
            self.thread = Shared()
            self.pop = lambda: gc.collect(0) and None

        def prepare(self, range_: Any) -> None:
            range_.push = lambda: None
            range_.backend = self

    def made(x: Tensor) -> Tensor:
        return Tensor(Node(world.sequence, x.grad_fn))

    def nodes(values: list[Any]) -> list[Any]:
        return grad_nodes(values)

    def use() -> None:
        try:
            while not stop.is_set():
                outer, inner = world.block("outer"), world.block("inner")
                call = twin.ranged(twin.ranged(made, inner), outer)
                call(Tensor(Node(3)))
                with outer, inner:
                    list(tool.thread.position.owners)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for number in range(300):
            tool = Quiet()
            twin.switch(tool)
            tool.thread.position = twin.Position()
            tool.thread = Shared()
            twin.follow(world._begin_task, partial(nodes), {int, type(None)}, Tensor, Parameter)
            twin.ask(lambda: world.task, lambda: True, lambda number=number: number % 7)
            if number % 5 == 0:
                twin.switch(None)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
        twin.switch(None)
    # nobody shares a Position: C must survive it, and in Python another thread may have emptied a list meanwhile
    expected = IndexError if twin is ranges_python else ()
    assert [error for error in errors if not isinstance(error, expected)] == []


def test_a_call_that_returns_an_older_tensor_does_not_take_its_node(world) -> None:
    old = world.operator(Tensor())
    returns_old = world.twin.ranged(lambda x: (world.operator(x), old)[1], world.block("returns old"))
    uses = world.twin.ranged(world.operator, world.block("uses"))
    world.backward(uses(returns_old(Tensor())))
    assert world.tool.log == ["returns old", "uses", "uses backward", "  node 3", "node 1"]


def test_pytorch_is_asked_once_about_a_thread_at_its_outermost_level(built) -> None:
    world = World(built)
    block, seen = world.block("call"), []

    def use() -> None:
        with block:
            seen.append(world.tool.log.pop().strip())

    def ask(*tasks: int) -> list[int]:
        """Answers of a builtin function, as PyTorch's is; from the last one on."""
        answers = [*tasks]
        built.ask(answers.pop, lambda: False, lambda: 0)
        return answers

    answers = ask(8, -1, 7)
    for _ in range(4):
        use()
    assert seen == ["call recompute", "call", "call", "call"]  # 7, then -1, which holds
    assert answers == [8]
    nested = ctypes.CFUNCTYPE(None)(use)  # runs in a hold of the GIL of its own, as hooks of autograd do
    nested()
    assert (seen.pop(), answers) == ("call recompute", [])
    answers = ask(-1, 8, -1, 9)
    thread = threading.Thread(target=lambda: [use() for _ in range(3)])
    thread.start()
    thread.join()
    assert seen[-3:] == ["call recompute", "call", "call"]
    assert answers == [-1, 8]
    nested()
    nested()
    assert seen[-2:] == ["call recompute", "call"]  # in a nested hold, it is asked each time
    built.switch(None)
