"""Random programs with ranges, and what a tool would see of each.

A program is a list of statements, and a statement is the name of a method of `World` with its arguments.
"""

import contextlib
import dataclasses
import gc
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvprof_kit._instrument.session as session
from nvprof_kit import annotate_model, layer_range, phase
from support.ranges.sink import Outline

Program = list[list[Any]]


class Boom(Exception): ...


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    rest: tuple[Any, ...]


RESULTS = {
    "tensor": lambda made: made,
    "tuple": lambda made: (made, 3, None),
    "deep": lambda made: ((((((made,), made), 1), "two"),),),
    "long": lambda made: (made,) * 20,
    "nested": lambda made: {"hidden": [made], "more": [(1, made)]},
    "record": lambda made: Output(made, (made, "text")),
    "view": lambda made: made.view(2, 2),
    "none": lambda _made: None,
}

OPERATIONS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "transpose": lambda a, _b: a.t(),
    "in place": lambda a, b: (a * 1).t().add_(b),
    "cat": lambda a, b: torch.cat([a.chunk(2)[0], b.chunk(2)[1]]),
    "detach": lambda a, _b: a.detach(),
    "leaf": lambda a, _b: a.detach().requires_grad_(),
}


class Fragile(nn.Module):
    """Two layers; may raise between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        hidden = self.first(x)
        if fails:
            raise Boom
        return x + self.second(hidden)


class Recorder(Outline):
    """A tool that records what each thread pushes, with its depth, and pops (None)."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def _record(self, text: str | None) -> None:
        thread = threading.current_thread().name
        self.log.append((thread, self.threads[thread], text))

    def _push(self, range_: session.Range) -> None:
        super()._push(range_)
        self._record(range_.text)

    def _pop(self) -> None:
        self._record(None)
        super()._pop()


class World:
    """State of a program: 2 x 2 tensors, an annotated model, and a tool."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.log: list[Any] = []
        self.threads = 0
        self.known = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)]
        self.model = nn.Sequential(*(Fragile() for _ in range(3)))

    def tensor(self, index: int) -> torch.Tensor:
        return self.known[index % len(self.known)]

    def run(self, program: Program) -> None:
        for name, *arguments in program:
            getattr(self, f"do_{name}")(*arguments)

    def caught(self, program: Program) -> None:
        try:
            self.run(program)
        except (Boom, RuntimeError) as error:
            self.log.append(f"! {type(error).__name__}")

    do_try = caught

    def do_raise(self) -> None:
        raise Boom

    def do_operation(self, name: str, left: int, right: int) -> None:
        self.known.append(OPERATIONS[name](self.tensor(left), self.tensor(right)))

    def do_with(self, name: str, program: Program) -> None:
        with layer_range(name):
            self.run(program)

    def do_phase(self, name: str, program: Program) -> None:
        with phase(name):
            self.run(program)

    def do_no_grad(self, program: Program) -> None:
        with torch.no_grad():
            self.run(program)

    def do_call(self, name: str, program: Program, argument: int, result: str) -> None:
        @layer_range(name)
        def function(x: torch.Tensor, more: Any = ()) -> Any:
            self.run(program)
            self.known.append(x * 2)
            return RESULTS[result](self.known[-1])

        function(self.tensor(argument), more=[self.known[-1]])

    def do_generator(self, name: str, programs: list[Program], resumes: int, end: str) -> None:
        @layer_range(name)
        def generate() -> Any:
            for program in programs:
                try:
                    self.run(program)
                    yield 1
                finally:
                    self.log.append("finally")

        generator = generate()
        for _ in range(resumes):
            if next(generator, None) is None:
                return
        if end == "throw":
            with contextlib.suppress(StopIteration):
                generator.throw(Boom)
        elif end == "close":
            generator.close()

    def do_coroutine(self, name: str, program: Program) -> None:
        class Pause:
            def __await__(self) -> Any:
                yield

        @layer_range(name)
        async def work() -> None:
            await Pause()
            self.run(program)
            await Pause()

        coroutine = work()
        with contextlib.suppress(StopIteration):
            while True:
                coroutine.send(None)

    def do_start(self, name: str, program: Program) -> None:
        started = layer_range.start(name)
        self.run(program)
        layer_range.end(started)

    def do_module(self, index: int, argument: int, fails: bool) -> None:
        self.known.append(self.model[index](self.tensor(argument), fails=fails))

    def do_checkpoint(self, index: int, argument: int, reentrant: bool) -> None:
        self.known.append(checkpoint(self.model[index], self.tensor(argument), use_reentrant=reentrant))

    def do_hook_fails(self, index: int) -> None:
        def fail(_gradient: torch.Tensor) -> None:
            raise Boom

        if self.tensor(index).requires_grad:
            self.tensor(index).register_hook(fail)

    def do_backward(self, index: int, retain: bool, create: bool) -> None:
        if self.tensor(index).requires_grad:
            self.tensor(index).sum().backward(retain_graph=retain or create, create_graph=create)

    def do_grad(self, outputs: list[int]) -> None:
        wanted = [self.tensor(index).sum() for index in outputs if self.tensor(index).requires_grad]
        if wanted:
            torch.autograd.grad(wanted, self.known[:1], create_graph=True, allow_unused=True)

    def do_thread(self, program: Program) -> None:
        self.threads += 1
        thread = threading.Thread(target=self.caught, args=(program,), name=f"thread {self.threads}")
        thread.start()
        thread.join()

    def do_switch(self, off: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # what others have open would stay open at the tool before
        session.deactivate()
        if not off:
            session.activate(Recorder(self.log))


def run(program: Program) -> tuple[list[Any], list[str]]:
    """Run a program; returns what the tool recorded, and the owners of ranges left open."""
    world = World()
    session.activate(Recorder(world.log))
    gc.disable()  # a collection comes when it likes: its place in the log would be chance
    try:
        with annotate_model(world.model, depth="leaf", root="model"):
            world.caught(program)
            for index in (-1, -2, -3):
                world.caught([["backward", index, True, False]])
    finally:
        gc.enable()
    log = list(world.log)
    world.known.clear()
    gc.collect()
    left = [] if session.backend is None else list(map(repr, session.backend.thread.position.owners))
    session.deactivate()
    return log, left


def leaks(program: Program, times: int) -> dict[str, int]:
    """What many runs leak: Python objects, and bytes of memory."""

    def counts() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return len(gc.get_objects()), pages * os.sysconf("SC_PAGE_SIZE")

    for _ in range(8):
        run(program)
    objects, memory = counts()
    for _ in range(times):
        run(program)
    more_objects, more_memory = counts()
    return {"objects": more_objects - objects, "bytes": more_memory - memory}


CHECKPOINTED = ["checkpoint", 0, -1, True], ["checkpoint", 1, -1, False], ["module", 2, -1, False]
EVERYTHING = [
    ["call", "a", [["with", "b", [["operation", "in place", 0, 1], *CHECKPOINTED]]], 0, "nested"],
    ["try", [["phase", "c", [["module", 0, 0, True]]]]],
    ["generator", "a", [[["module", 1, -1, False]], [["raise"]]], 1, "throw"],
    ["coroutine", "b", [["backward", -1, True, True], ["grad", [-1, -2]]]],
    ["thread", [["call", "c", [["module", 2, 0, False]], -1, "deep"], ["backward", -1, True, False]]],
    ["with", "b", [["switch", False], ["call", "b", [["operation", "cat", -1, 0]], -1, "record"]]],
    ["hook_fails", -2],
]
"""A program that does a bit of everything, and whose last backward pass is aborted by a hook."""
