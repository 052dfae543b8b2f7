"""Fake tool, tensors and autograd nodes for `ranges_python` and the C extension, without torch."""

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
    """A tensor with the node that created it."""

    def __init__(self, grad_fn: Node | None = None, _base: Tensor | None = None) -> None:
        self.grad_fn = grad_fn
        self._base = _base


class Parameter(Tensor):
    """A parameter."""


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
    """A tool that records ranges; opening the range named ``fails`` raises."""

    def __init__(self, twin: ModuleType) -> None:
        class Thread(threading.local):
            def __init__(self) -> None:
                self.position = twin.Position()

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
        self.thread.position.add(owner)


class World:
    """An implementation of ranges, its tool, and the state of autograd.

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
        position = self.tool.thread.position
        position.number, position.at = self.task, self.twin.OUTSIDE

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
        position = self.tool.thread.position
        while position.at is not self.twin.OUTSIDE:
            position.close(position.at, self.tool.pop)
            position.at = position.at.parent
        position.number, self.task = -2, -1
