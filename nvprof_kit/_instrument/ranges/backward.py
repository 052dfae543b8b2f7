"""The backward passes through calls of layers, and what activation checkpointing runs again in them.

Calls of layers are frames of a tree, and the backward pass moves through this tree. Autograd runs the nodes of one
device on one thread, in the reverse order of their creation. So the backward ranges of layers nest on that thread as
their calls did, and a few nodes need to be marked with the call that created them: the node of each output, and each
node where the backward pass returns from a layer to the enclosing code. A prehook on such a node moves the thread's
position in the tree: it closes the ranges of completed layers and opens those of beginning ones. The hooks return
nothing and keep no tensor alive. Module backward hooks are not used, because they wrap inputs and outputs and forbid
in-place operations on views.

If a layer's call is checkpointed, the backward pass calls the layer again, and its range is that of the recompute. If
a checkpoint is inside its forward (the blocks of transformers 5, PyTorch's ``CheckpointWrapper``), the backward pass
only runs the checkpointed function again. So that function is ranged here, as recompute of the layer that called the
checkpoint.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import methodcaller
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.autograd import Variable

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Handle, Patch, Patches, skip_compiling, uncompiled, uncompiled_itself, unseen
from nvprof_kit._instrument.ranges import ranges
from nvprof_kit._instrument.ranges.ranges import Block, Layer, Position, Range, is_ranged
from nvprof_kit._instrument.session import Annotation, Backend
from nvprof_kit.names import Category

_MAX_VALUES = 10_000
"""Maximum number of values to search; also ends the search of a structure that contains itself."""

_Parts = Callable[[Any], Iterable[Any]]


@uncompiled
def grad_nodes(values: list[Any]) -> list[Any]:
    """The autograd nodes that created the tensors in values, in nested lists, tuples, mappings and dataclasses.

    For a view, this includes the node of its base: an in-place operation on the view later replaces the view's own
    node.

    Args:
        values: The values to search; the list is modified.
    """
    nodes = []
    for value in values:  # the list grows during the loop
        kind = type(value)
        try:
            parts_of = _kinds[kind]
        except KeyError:
            parts_of = _learn(kind)
        if parts_of is None:
            continue
        if parts_of is not _of_tensor:
            if len(values) < _MAX_VALUES:
                values += parts_of(value)
        elif (node := value.grad_fn) is not None:
            nodes.append(node)
            base = value._base
            if base is not None and base.grad_fn is not None:
                nodes.append(base.grad_fn)
    return nodes


def _of_tensor(_tensor: Any) -> tuple[Any, ...]:
    return ()


@unseen
def _learn(kind: type) -> _Parts | None:
    """A function that returns the parts of a value of this type; None if no tensors can be found in it."""
    parts_of: _Parts | None = None
    if issubclass(kind, torch.Tensor):
        parts_of = _of_tensor
    elif issubclass(kind, (list, tuple)):
        parts_of = iter
    elif issubclass(kind, Mapping):
        parts_of = methodcaller("values")
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        parts_of = lambda record: [getattr(record, name, None) for name in names]  # noqa: E731
    _kinds[kind] = parts_of
    return parts_of


_kinds: dict[type, _Parts | None] = {}


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass running on this thread; -1 if none."""


sequence: Callable[[], int] = torch.autograd._get_sequence_nr
"""Sequence number of the next autograd node of this thread."""

_LEFT = "nvprof_kit"
"""Metadata key of nodes whose tensor was returned by an outermost call."""

_ACCUMULATE_GRAD = 2**64 - 1
"""Sequence number of nodes that accumulate a leaf's gradient; they belong to no call and run right after the node
before.
"""


@uncompiled
def mark(node: Any, hook: Callable[[object], None], position: Position) -> None:
    """Make a node call the hook before it runs, as ``Tensor.register_hook`` does with a tensor's first hook.

    A tensor carries the hook to the node, which keeps its dictionary. A node's ``register_prehook`` takes twice as
    long: it makes a handle, and passes all gradients.
    """
    position.carrier._backward_hooks = {0: hook}
    node._register_hook_dict(position.carrier)


class Frame:
    """One call of a layer, while it runs and then for the backward pass; also the prehook of its marked nodes.

    Attributes:
        layer: The layer.
        parent: The enclosing call; None for the outermost.
        depth: The number of enclosing calls.
        first: Autograd sequence number at the call's begin.
        edges: The first number, then the numbers at the begin and end of each nested call. Nodes numbered from the
            first, third, … edge on belong to the call, from the second, fourth, … to a nested call. None before
            one, and what follows is not set.
        visited: Sequence numbers of the call's own nodes that were visited by searches, while the call runs. None
            before a search, which is needed once a nested call finds several new nodes, or one that no plain argument
            carries: until then, all own nodes up to the last nested call are marked.
        marked: Sequence numbers of the marked ones, set by the first search.
        section: The first section that searches look at, likewise.
        node_count: How many nodes the call itself has created from there up to its last nested call. While all are
            visited, the arguments of a nested call are not looked at.
    """

    __slots__ = ("depth", "edges", "first", "layer", "marked", "node_count", "parent", "section", "visited")

    layer: Layer
    parent: Frame | None
    depth: int
    first: int
    edges: Any
    visited: set[int] | None
    marked: set[int] | None
    node_count: int

    @uncompiled
    def end(self, position: Position, outputs: Any) -> None:
        """The call ends, with these outputs."""
        parent, first, edges, last = self.parent, self.first, self.edges, sequence()
        position.call = parent
        if parent is None:
            _mark_outputs(self, position, outputs)
            position.arguments = {}
        elif last > first:
            since = first if edges is None else edges[-1]
            if edges is not None and (self.visited is not None or last > since + 1):
                _mark_outputs(self, position, outputs)
            elif last > since:
                for output in outputs if type(outputs) is tuple else (outputs,):
                    if output is not None and self.mark_maker(output, since, position) is None:
                        _mark_outputs(self, position, outputs)
                        break
            parent.edges += (first, last)

    @uncompiled
    def mark_maker(self, value: Any, since: int, position: Position) -> bool | None:
        """Mark the node of a tensor if it is numbered from `since` on; whether it is. None for views and other values,
        whose nodes only a search finds. Written out, as `mark` is called for each module and step.
        """
        if type(value) is not Tensor or value._base is not None:
            return None
        node: Any = value.grad_fn
        if node is None or node._sequence_nr() < since or (position.arguments and id(node) in position.arguments):
            return False
        position.carrier._backward_hooks = {0: self}
        node._register_hook_dict(position.carrier)
        return True

    @uncompiled
    def search(self, edges: list[int], nodes: list[Any], position: Position) -> None:
        """Mark the nodes at which a backward pass that arrives at the call's own ones of these nodes enters these.

        If the call contains nested calls, its own nodes are in sections between them. So the backward pass may enter a
        section at other nodes than the output's; these are found by a search from there.
        """
        arguments = position.arguments
        if self.visited is None or self.marked is None:
            self.visited, self.marked, self.section = set(), set(), len(edges)
        visited, marked = self.visited, self.marked
        pending = [(node, 0) for node in nodes]
        while pending:
            node, origin = pending.pop()
            number = node._sequence_nr()
            section = bisect_right(edges, number)
            if not section & 1 or section < self.section or number == _ACCUMULATE_GRAD or id(node) in arguments:
                continue
            if section != origin and number not in marked:
                marked.add(number)
                mark(node, self, position)
            if number not in visited:
                visited.add(number)
                if section > 1 and len(marked) < self.node_count:  # no section follows the first one
                    pending += [(maker, section) for maker, _ in node.next_functions if maker is not None]

    @uncompiled
    def __call__(self, _grads: object) -> None:
        """Move this thread's backward pass to this call."""
        backend = session.backend
        if backend is None:
            return
        position = backend.thread.position
        if position.number != graph_task():
            _begin_task(backend)
        at, owners, parent, depth, pop = position.at, position.owners, self.parent, self.depth, backend.pop
        while at is not None and at is not self and at.depth >= depth:
            if owners and owners[-1] is at:
                owners.pop()
                pop()
            else:
                position.close(at, pop)
            at = at.parent
        position.at = at
        if at is self:
            return
        if parent is not at and parent is not None:
            parent(None)
        range_: Any = self.layer.backward
        if range_.backend is not backend:
            backend.prepare(range_)
        push = range_.push
        push()
        owners.append(self)
        position.at = self


@uncompiled
def _leave(_grads: object) -> None:
    """Move this thread's backward pass out of all calls: the hook of what was created outside them."""
    backend = session.backend
    if backend is None:
        return
    position = backend.thread.position
    if position.number != graph_task():
        _begin_task(backend)
    _close_calls(position, backend)


@uncompiled
def follow(position: Position, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Begin a call of a layer that is followed into the backward pass; `Frame.end` ends it.

    Runs for each module and step, so the usual cases are written out here instead of in functions of their own.
    """
    parent, first = position.call, sequence()
    call = Frame()
    call.layer, call.parent, call.first, call.edges = layer, parent, first, None
    if parent is None:
        call.depth = 0
        _mark_arguments(position, [*args, *kwargs.values()])
    else:
        call.depth = parent.depth + 1
        if parent.edges is None:
            parent.edges, parent.node_count, parent.visited = [parent.first], 0, None
        since = parent.edges[-1]
        new = first - since
        if parent.visited is not None or (
            new and not (new == 1 and args and parent.mark_maker(args[0], since, position))
        ):
            parent.node_count += new
            if parent.node_count > len(parent.visited or ()):  # an argument may be new
                parent.search(parent.edges, grad_nodes([*args, *kwargs.values()]), position)
    position.call = call  # only now, as a search may raise: an argument's own code runs in it
    return call


@uncompiled
def _mark_arguments(position: Position, arguments: list[Any]) -> None:
    """Mark the nodes that created the arguments of an outermost call."""
    if position.carrier is None:
        position.carrier = torch.empty(0, device="cpu")
    nodes = grad_nodes(arguments)
    position.arguments = {id(node): node for node in nodes}
    if graph_task() == -1:  # in a recompute, they belong to the graph that is run backward
        for node in nodes:
            if _LEFT not in node.metadata:
                mark(node, _leave, position)


@uncompiled
def _mark_outputs(call: Frame, position: Position, outputs: Any) -> None:
    """Mark the call's own nodes that created its outputs."""
    nodes = grad_nodes([outputs])
    if call.parent is None:
        for node in nodes:
            if node._sequence_nr() >= call.first and id(node) not in position.arguments:
                node.metadata[_LEFT] = True
    if call.edges is None:
        call.edges, call.node_count, call.visited = [call.first], 0, None
    if call.visited is not None:
        call.node_count += sequence() - call.edges[-1]
    call.search(call.edges, nodes, position)
    call.visited = call.marked = None


class Task:
    """A backward pass (a graph task of the autograd engine) on one thread.

    Attributes:
        outer: The enclosing pass on this thread (reentrant checkpointing), if any, with its number and its current
            frame.
        ended: Whether the engine has completed the pass; any thread may set it.
    """

    __slots__ = ("ended", "outer")

    def __init__(self, position: Position) -> None:
        self.outer: tuple[Task | None, int, Frame | None] = position.task, position.number, position.at
        self.ended = False


class _End:
    """Ends a backward pass: the engine calls it at completion, and drops it at completion or abort."""

    __slots__ = ("_backend", "_task")

    def __init__(self, task: Task, backend: Backend) -> None:
        self._task = task
        self._backend = backend

    def __call__(self) -> None:
        self._task.ended = True
        if self._backend is session.backend:
            _close_ended(self._backend)

    __del__ = __call__


@uncompiled
def _close_calls(position: Position, backend: Backend) -> None:
    while position.at is not None:
        position.close(position.at, backend.pop)
        position.at = position.at.parent


@uncompiled
def _close_ended(backend: Backend) -> None:
    position = backend.thread.position
    while position.task is not None and position.task.ended:
        _close_calls(position, backend)
        position.task, position.number, position.at = position.task.outer


@uncompiled
def _begin_task(backend: Backend) -> None:
    """Enter a backward pass on this thread, at its first marked node."""
    _close_ended(backend)
    position = backend.thread.position
    position.task, position.number, position.at = Task(position), graph_task(), None
    Variable._execution_engine.queue_callback(_End(position.task, backend))


ranges.follow, ranges.grad_enabled = follow, torch.is_grad_enabled  # in this order: other threads may call it now


def _patches() -> list[Patch]:
    frame, function = getattr(checkpoints, "_CheckpointFrame", None), checkpoints.CheckpointFunction
    frames = [] if frame is None else [Patch(frame, "__init__", _keep_ranged)]
    return [*frames, Patch(function, "forward", lambda forward: staticmethod(_keep_ranged(forward)))]


recomputes = Patches(_patches)
"""Ranges the recomputes of PyTorch's checkpoints while a user needs it and ranges are emitted."""


def _keep_ranged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that saves its second argument for the backward pass, so that it saves the ranged function."""

    @functools.wraps(original)
    def keep(first: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(first, _ranged(function), *args, **kwargs)

    skip_compiling(keep, callees=False)
    return keep


class Recomputes(Annotation):
    """Ranges checkpoints while ranges are emitted, for an owner of layers without `annotate_model`."""

    def _install(self, _owner: Any) -> list[Handle]:
        return [recomputes.hold(self)]


def range_checkpoints() -> None:
    """Range checkpoints from now on, for decorated functions and blocks of code, which cannot be removed."""
    if range_checkpoints not in session.annotated:
        Recomputes(range_checkpoints)


@uncompiled
def _ranged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The checkpointed function, ranged as recompute of the innermost layer in forward or recompute on this thread."""
    backend = session.backend
    if backend is None:
        return function
    called: Any = function
    code = getattr(called, "__code__", None)
    if code is not None and code.co_name == "recompute_fn" and "fn" in code.co_freevars:
        called = called.__closure__[code.co_freevars.index("fn")].cell_contents
    while isinstance(called, functools.partial):
        called = called.func
    if not isinstance(called, nn.Module) and getattr(called, "__name__", "") in ("__call__", "_wrapped_call_impl"):
        called = getattr(called, "__self__", None)
    if isinstance(called, nn.Module) and is_ranged(called):  # the function only calls a module that ranges itself
        return function
    for owner in reversed(backend.thread.position.owners):
        if isinstance(owner, Layer):
            return function if owner.recompute is owner.range else functools.partial(_run, owner.recompute, function)
        if isinstance(owner, Block) and owner.range.category is Category.RECOMPUTE:
            return functools.partial(_run, owner.range, function)
        if isinstance(owner, Frame):  # the backward pass, not inside a recompute
            break
    return function


@uncompiled_itself
def _run(recompute: Range, function: Callable[..., Any], /, *args: Any) -> Any:
    """Run the checkpointed function; in a backward pass, as recompute, once for nested checkpoints."""
    backend = session.backend
    if backend is None or graph_task() == -1:
        return function(*args)
    owners = backend.thread.position.owners
    if owners and isinstance(owners[-1], Block) and owners[-1].range is recompute:
        return function(*args)
    with Block(recompute):
        return function(*args)
