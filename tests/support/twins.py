"""A small world for `ranges_python` and its twin in C: a tool, tensors and autograd nodes, and nothing of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Node:
    """An autograd node."""

    def __init__(self, number: int, *makers: Node) -> None:
        self.number = number
        self.next_functions = tuple((maker, 0) for maker in makers)
        self.metadata: dict[str, Any] = {}
        self.hooks: list[Callable[[Any], None]] = []

    def _sequence_nr(self) -> int:
        return self.number

    def register_prehook(self, hook: Callable[[Any], None]) -> None:
        if hook not in self.hooks:
            self.hooks.append(hook)


class Tensor:
    """Knows the node that made it."""

    def __init__(self, grad_fn: Node | None = None, _base: Tensor | None = None) -> None:
        self.grad_fn = grad_fn
        self._base = _base


class Parameter(Tensor):
    """A tensor of its own kind."""


def grad_nodes(values: list[Any]) -> list[Any]:
    """`tensors.grad_nodes` for these tensors."""
    nodes = []
    for value in values:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                nodes.append(value.grad_fn)
                if value._base is not None and value._base.grad_fn is not None:
                    nodes.append(value._base.grad_fn)
        elif isinstance(value, (list, tuple)):
            values += value
    return nodes


class Tool:
    """Writes down what it is told; ``fails`` names a range that cannot be opened."""

    def __init__(self, twin: ModuleType) -> None:
        class Thread(threading.local):
            def __init__(self) -> None:
                self.here = twin.Here()

        self.thread = Thread()
        self.log: list[str] = []
        self.depth = 0
        self.fails = ""

    def prepare(self, range_: Any) -> None:
        range_.push = lambda: self._push(range_.text)
        range_.backend = self

    def _push(self, text: str) -> None:
        if text == self.fails:
            raise OSError(text)
        self.log.append("  " * self.depth + text)
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1

    def open(self, range_: Any, owner: object) -> None:
        self.prepare(range_)
        range_.push()
        self.thread.here.add(owner)


class World:
    """A twin, the tool that it talks to, and the state of autograd.

    Attributes:
        task: The number of the backward pass that runs.
        sequence: The number that the next node will have.
    """

    def __init__(self, twin: ModuleType) -> None:
        self.twin = twin
        self.task = -1
        self.sequence = 1
        self.grad = True
        self.nodes: list[Node] = []
        self.tool = Tool(twin)
        twin.ask(lambda: self.task, lambda: self.grad, lambda: self.sequence)
        twin.follow(self._begin_task, grad_nodes, {int, str, type(None)}, Tensor, Parameter)
        twin.switch(self.tool)

    def _begin_task(self) -> None:
        here = self.tool.thread.here
        here.number, here.at = self.task, self.twin.OUTSIDE

    def block(self, name: str, *, backward: bool = True) -> Any:
        ranges = [self.twin.Range(text, "forward") for text in (name, f"{name} recompute", f"{name} backward")]
        return self.twin.Block(*ranges[:2], ranges[2] if backward else None)

    def operator(self, *inputs: Tensor) -> Tensor:
        node = Node(self.sequence, *(tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None))
        self.nodes.append(node)
        self.sequence += 1
        return Tensor(node)

    def backward(self, result: Tensor) -> None:
        """Run the hooks of all nodes behind a result, latest node first, as the engine does."""
        reached, pending = set(), [result.grad_fn]
        while pending:
            node = pending.pop()
            if node is not None and node not in reached:
                reached.add(node)
                pending += [maker for maker, _ in node.next_functions]
        self.task = 1 + max(0, self.task)
        for node in sorted(reached, key=Node._sequence_nr, reverse=True):
            for hook in node.hooks:
                hook(())
            self.tool.log.append("  " * self.tool.depth + f"node {node.number}")
        here = self.tool.thread.here
        while here.at is not self.twin.OUTSIDE:
            here.close(here.at, self.tool.pop)
            here.at = here.at.parent
        here.number, self.task = -2, -1
