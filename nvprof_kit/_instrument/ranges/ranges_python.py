"""Ranges and layer calls: the code that runs for each range, with `frames_python`.

`ranges_c/` implements both modules in C and replaces them if it could be built; their documentation applies to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nvprof_kit._instrument.compile.uncompiled import uncompiled, uncompiled_itself
from nvprof_kit._instrument.ranges.frames_python import NONE, OUTSIDE, Frame, now
from nvprof_kit.names import encodable

INTERFACE = 6
"""Changes with the interface of this module and the C extension, so that an outdated extension is not loaded."""


def switch(backend: Any) -> None:
    """Send ranges to this backend (`backends.Backend`) from now on; None for nowhere."""
    now.backend = backend


def ask(task: Callable[[], int], grad: Callable[[], bool], sequence: Callable[[], int], _grad_mode: int = 0) -> None:
    """Set the functions about the calling thread.

    Args:
        task: Returns the number of the running backward pass, or -1.
        grad: Returns whether gradients are enabled.
        sequence: Returns the sequence number of the next autograd node.
        _grad_mode: Address of a C function that returns what ``grad`` does, or 0. Used only in C.
    """
    now.task, now.grad, now.sequence = task, grad, sequence


def follow(
    begin_task: Callable[[], None],
    grad_nodes: Callable[[list[Any]], list[Any]],
    _plain: set[type],
    _tensor: type,
    _parameter: type,
) -> None:
    """Set what following the backward pass needs; before, no call is followed (see `frames.begin_following`).

    Args:
        begin_task: Called when a backward pass begins on the calling thread, to enter it in the thread's `Position`.
        grad_nodes: `tensors.grad_nodes`.
        _plain: The types known to have no tensors; the set may grow. Used only in C, like the next two.
        _tensor: The type of tensors.
        _parameter: The type of parameters.
    """
    now.begin_task, now.grad_nodes = begin_task, grad_nodes


class Range:
    """A named range, built once and opened many times.

    Attributes:
        text: The name in the tool: a layer's path (and its phase), a phase, a step; made `names.encodable`.
        category: The NVTX category.
        payload: The layer's index or the step's number; None for others.
        backend: The backend that made `push`.
        push: Opens the range on the calling thread; set by `backends.Backend.prepare`.
    """

    __slots__ = ("backend", "category", "payload", "push", "text")
    __module__ = "nvprof_kit._instrument.ranges.ranges"  # a pickle loads the implementation in use there

    def __init__(self, text: str, category: Any, payload: int | None = None) -> None:
        self.text = encodable(text) if isinstance(text, str) else text
        self.category = category
        self.payload = payload
        self.backend: Any = None
        self.push: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Range, (self.text, self.category, self.payload)

    def __repr__(self) -> str:
        return f"Range({self.text!r}, {self.category!r})"


class Position:
    """State of a thread.

    Attributes:
        owners: Owners of the thread's open ranges, innermost last.
        task: The running backward pass on the thread, if any (`frames.Task`).
        number: The engine's number of that pass; less than -1 if none.
        at: The call whose nodes are running.
    """

    __slots__ = ("_calls", "at", "number", "owners", "task")

    def __init__(self) -> None:
        self.owners: list[object] = []
        self.task: Any = None
        self.number = -2
        self.at = OUTSIDE
        self._calls: list[_Call] = []

    def add(self, owner: object) -> None:
        """Add an open range; its owner, any object, identifies it for `close`."""
        self.owners.append(owner)

    def close(self, owner: object, pop: Callable[[], None]) -> None:
        """Close the owner's innermost range and all ranges inside it; does nothing if there is none."""
        index = self._find(owner)
        if index >= 0:
            self._close_from(index, pop)

    def close_all(self, pop: Callable[[], None]) -> None:
        """Close all ranges."""
        self._close_from(0, pop)

    def _find(self, owner: object) -> int:
        """Index of the owner's innermost range; -1 if there is none."""
        index = len(self.owners) - 1
        while index >= 0 and self.owners[index] is not owner:
            index -= 1
        return index

    def _close_from(self, index: int, pop: Callable[[], None]) -> None:
        while self._calls and self._calls[-1].index >= index:
            self._calls.pop()
        while len(self.owners) > index:
            self.owners.pop()
            pop()

    def begin(self, block: Block, values: list[Any], recomputes: bool) -> None:
        """Follow a call with these arguments, after the block's range was opened."""
        given = NONE
        if nodes := now.nodes(values):
            outer = self._frame(len(self._calls) - 1)
            if not (recomputes and outer is OUTSIDE):  # else they belong to the graph that is run backward
                outer.mark(nodes, ends=False)
            if outer is OUTSIDE:
                given = {id(node): node for node in nodes}
        self._calls.append(_Call(len(self.owners) - 1, block.owner, block.backward, now.sequence(), given))

    def end(self, block: Block, outputs: Any) -> None:
        """End the block's call, if it is followed, and calls left open in it."""
        calls, index = self._calls, self._find(block.owner)
        while calls and calls[-1].index > index >= 0:
            calls.pop()
        if not calls or calls[-1].index != index:
            return
        alone = len(calls) == 1 and calls[0].frame is None
        nodes = [] if outputs is None or not alone else now.nodes([outputs])
        if not (calls[-1].has_made_any(nodes) if alone else calls[-1].may_have_made()):
            calls.pop()
            return
        frame = self._frame(len(calls) - 1)
        calls.pop()
        frame.end(nodes if alone or outputs is None else now.nodes([outputs]))

    def _frame(self, place: int) -> Frame:
        """The frame of a followed call, by index; creates missing frames of the call and the enclosing calls."""
        known = place
        while known >= 0 and self._calls[known].frame is None:
            known -= 1
        frame = (self._calls[known].frame if known >= 0 else None) or OUTSIDE
        for call in self._calls[known + 1 : place + 1]:
            given = call.given
            if frame is not OUTSIDE:
                frame.edges.append(call.begin)
                given = frame.given
            call.frame = frame = Frame(call.layer, call.backward, frame, call.begin, given)
        return frame


class _Call:
    """A running, followed call: the index of its range in `Position.owners`, and its frame, created when needed."""

    __slots__ = ("backward", "begin", "frame", "given", "index", "layer")

    def __init__(self, index: int, layer: object, backward: Range | None, begin: int, given: Mapping[int, Any]) -> None:
        self.index = index
        self.layer = layer
        self.backward = backward
        self.begin = begin
        self.given = given
        self.frame: Frame | None = None

    def may_have_made(self) -> bool:
        """Whether autograd nodes were created in the call, which ends now."""
        return self.frame is not None or self.begin != now.sequence()

    def has_made_any(self, nodes: list[Any]) -> bool:
        """Whether the call created any of these nodes. Asking for the number of the next node takes longer."""
        return any(node._sequence_nr() >= self.begin and id(node) not in self.given for node in nodes)


class Block:
    """A range around a ``with`` block or around calls; reusable and reentrant.

    Attributes:
        range: The range.
        recompute: The range inside a running backward pass; by default the same.
        backward: The range of the backward pass of a call's outputs; None if calls are not followed.
        owner: Owner of the ranges; by default the block.
    """

    __slots__ = ("backward", "owner", "range", "recompute")

    def __init__(
        self,
        range_: Range,
        recompute: Range | None = None,
        backward: Range | None = None,
        owner: object = None,
    ) -> None:
        self.range = range_
        self.recompute = range_ if recompute is None else recompute
        self.backward = backward
        self.owner = self if owner is None else owner

    @uncompiled
    def __enter__(self) -> Block:
        backend = now.backend
        if backend is not None:
            range_ = self.range
            if self.recompute is not range_ and now.task() != -1:
                range_ = self.recompute
            if range_.backend is not backend:
                backend.prepare(range_)
            range_.push()
            backend.thread.position.owners.append(self.owner)
        return self

    @uncompiled
    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        backend = now.backend
        if backend is not None:
            position = backend.thread.position
            if position.owners and position.owners[-1] is self.owner:
                position.owners.pop()
                backend.pop()
            else:
                position.close(self.owner, backend.pop)

    @uncompiled
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin a call on this thread; returns whether ranges are emitted."""
        backend = now.backend
        if backend is None:
            return False
        Block.__enter__(self)
        if self.backward is not None and now.grad_nodes is not None and now.grad():
            try:
                backend.thread.position.begin(self, [*args, *kwargs.values()], self._recomputes())
            except BaseException:
                self.end(None)
                raise
        return True

    def _recomputes(self) -> bool:
        return self.recompute is not self.range and now.task() != -1

    @uncompiled
    def end(self, outputs: Any) -> None:
        """End this thread's call and close ranges left open in it; ``outputs`` is None if the call raised."""
        backend = now.backend
        if backend is None:
            return
        try:
            if self.backward is not None:
                backend.thread.position.end(self, outputs)
        finally:
            Block.__exit__(self, None, None, None)


def ranged(function: Callable[..., Any], block: Block) -> Callable[..., Any]:
    """Wrap a function to run inside a block."""
    return partial(call_inside, block, function)


@uncompiled_itself
def call_inside(block: Block, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a block."""
    outputs = None
    begun = block.begin(args, kwargs)
    try:
        outputs = function(*args, **kwargs)
        return outputs
    finally:
        if begun:
            block.end(outputs)
