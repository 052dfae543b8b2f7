"""Ranges of layers inside compiled code, called by the code that Inductor generates (`inductor`).

The generated code gives the path of each kernel's module relative to the compiled module. All blocks with the same code
share one compiled function, so the full path depends on the enclosing layer.
"""

from __future__ import annotations

from nvprof_kit._instrument import session
from nvprof_kit._instrument.ranges.backends import Range
from nvprof_kit._instrument.ranges.layer import Layer
from nvprof_kit._instrument.ranges.ranges import Frame


def enter(path: str, recomputes: bool = False) -> None:
    """Move to the module at a path below the compiled module: close ranges outside the path, open missing ones.

    Each range is its own owner.

    Args:
        path: The path; '' for the compiled module itself.
        recomputes: Whether the backward pass recomputes the module's forward.
    """
    backend = session.backend
    if backend is None:
        return
    owners = backend.thread.position.owners
    outer_count = len(owners)
    while outer_count and type(owners[outer_count - 1]) is Range:
        outer_count -= 1
    ranges = _ranges_below(owners[outer_count - 1], path, recomputes) if outer_count and path else ()
    stay = outer_count
    for range_ in ranges:
        if stay == len(owners) or owners[stay] is not range_:
            break
        stay += 1
    if stay < len(owners):
        backend.close(owners[stay])
    for range_ in ranges[stay - outer_count :]:
        backend.open(range_, range_)


def leave() -> None:
    """Close all ranges opened by `enter`, at the end of the compiled code."""
    enter("")


def _ranges_below(owner: object, path: str, recomputes: bool) -> tuple[Range, ...]:
    """The ranges of the layers from the open layer (exclusive) down to a path below it."""
    layer = owner.layer if isinstance(owner, Frame) else owner
    if not isinstance(layer, Layer) or layer.family is None:
        return ()
    layers = layer.family.below(layer, path)
    if recomputes or (session.graph_task() != -1 and not isinstance(owner, Frame)):
        return tuple(layer_below.recompute for layer_below in layers)
    if isinstance(owner, Frame):
        return tuple(layer_below.backward for layer_below in layers if layer_below.backward is not None)
    return tuple(layer_below.forward for layer_below in layers)
