"""Ranges around the kernel launches in code that torch.compile generates.

Inductor fuses a graph into kernels and generates a Python function that launches them. While `kernels` has a user, the
generated code calls `enter` with the kernel's module before each launch, in forward and backward, also in a graph of
the whole model. The kernels, their order and their memory use do not change. The path of the module is relative to the
compiled module: all blocks with the same code share one compiled function, so the full path depends on the enclosing
layer.

A kernel belongs to the module whose results it writes. Intermediate values, such as forward values recomputed in the
backward pass, do not count. If a kernel writes results of several modules, it belongs to the innermost module that
contains them all. A kernel of the backward graph that only recomputes forward values is recompute.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from nvprof_kit._instrument import session
from nvprof_kit._instrument.patches import Handle, Patch, Patches, before
from nvprof_kit._instrument.ranges.backward import Frame, graph_task
from nvprof_kit._instrument.ranges.ranges import Layer, Range
from nvprof_kit.names import strip_wrappers


class Family:
    """The layers of one model by path.

    Args:
        layers: The layers.
        root: Name of the model itself, which is not a prefix of the other paths.
    """

    def __init__(self, layers: Mapping[str, Layer], root: str) -> None:
        self._layers = layers
        self._root = root
        self._below: dict[tuple[str, str], tuple[Layer, ...]] = {}

    def below(self, layer: Layer, path: str) -> tuple[Layer, ...]:
        """The layers from a layer (exclusive) down to a path below it, outermost first."""
        if (layer.path, path) not in self._below:
            above = [] if layer.path == self._root else layer.path.split(".")
            parts = path.split(".")
            paths = (".".join(above + parts[: length + 1]) for length in range(len(parts)))
            self._below[layer.path, path] = tuple(self._layers[inner] for inner in paths if inner in self._layers)
        return self._below[layer.path, path]


def enter(path: str, recomputes: bool = False) -> None:
    """Move to the module at a path below the compiled module: close ranges outside the path, open missing ones.

    Each range is its own owner.

    Args:
        path: The path; '' for the compiled module itself, also at the end of the compiled code.
        recomputes: Whether the backward pass recomputes the module's forward.
    """
    backend = session.backend
    if backend is None:
        return
    owners = backend.thread.position.owners
    outer_count = len(owners)
    while outer_count and type(owners[outer_count - 1]) is Range:
        outer_count -= 1
    owner = owners[outer_count - 1] if outer_count else None
    layer = owner.layer if isinstance(owner, Frame) else owner
    ranges: list[Range] = []
    if path and isinstance(layer, Layer) and layer.family is not None:
        layers = layer.family.below(layer, path)
        if recomputes or (graph_task() != -1 and not isinstance(owner, Frame)):
            ranges = [layer_below.recompute for layer_below in layers]
        elif isinstance(owner, Frame):
            ranges = [layer_below.backward for layer_below in layers if layer_below.backward is not None]
        else:
            ranges = [layer_below.range for layer_below in layers]
    stay = outer_count
    for range_ in ranges:
        if stay == len(owners) or owners[stay] is not range_:
            break
        stay += 1
    if stay < len(owners):
        backend.close(owners[stay])
    for range_ in ranges[stay - outer_count :]:
        backend.open(range_, range_)


_IMPORT = "from nvprof_kit._instrument.compile import enter as nvprof_kit_enter"

CACHE_TAG = f"+nvprof_kit-ranges-4-{zlib.crc32(_IMPORT.encode()):08x}"
"""Separates code with these lines from other code in the compiler's caches, which persist across programs and releases.
The number is incremented when the lines change.
"""
_ROOT = re.compile(r"L\['self'\]")
_BACKWARD = ("is_backward", "must_be_in_backward")
_PART = re.compile(r"\._modules\['([^']*)'\]|\['?([^'\]]*)'?\]")


def _patches() -> list[Any]:
    import torch
    from torch._inductor import scheduler
    from torch._inductor.codegen import cpp, wrapper
    from torch._inductor.virtualized import V

    kinds = (wrapper.PythonWrapperCodegen, wrapper.SubgraphPythonWrapperCodegen)

    def mark(nodes: Sequence[Any]) -> None:
        code = V.graph.wrapper_code
        if type(code) not in kinds:  # C++ wrapper, or the wrapper of a custom device
            return
        code.writeline(f"nvprof_kit_enter{_where(nodes, getattr(V.graph, 'is_backward', False))!r}")
        code.nvprof_kit = True
        while hasattr(code, "parent_wrapper"):
            code = code.parent_wrapper
        code.add_import_once(_IMPORT)

    def of_node(_self: Any, node: Any) -> None:
        if not _on_cpu(node):
            mark(node.get_nodes())

    def of_call(_self: Any, node: Any) -> None:
        if _on_cpu(node):
            mark(node.get_nodes())

    def of_group(_self: Any, nodes: Sequence[Any], *_rest: Any) -> None:
        mark(nodes)

    def at_end(self: Any, _outputs: Any) -> None:
        if getattr(self, "nvprof_kit", False):
            self.wrapper_call.writeline("nvprof_kit_enter('')")

    places = (
        (scheduler.Scheduler, "enter_context", of_node),
        # Inductor writes CPU kernels when a group is complete, long after the scheduler has visited their nodes
        (scheduler.Scheduler, "codegen_extern_call", of_call),
        (cpp.CppScheduling, "codegen_comment", of_group),
        (wrapper.PythonWrapperCodegen, "generate_return", at_end),
    )
    for owner, name, _ in places:
        getattr(owner, name)  # if one is missing, none is patched
    settings = torch.compiler.config
    settings.cache_key_tag += CACHE_TAG

    def restore() -> None:
        settings.cache_key_tag = settings.cache_key_tag.removesuffix(CACHE_TAG)

    return [Handle(restore), *(Patch(owner, name, before(first)) for owner, name, first in places)]


kernels = Patches(_patches)
"""Makes Inductor emit ranges in generated code while a user needs them. `Patches.hold` raises ImportError or
AttributeError if the internals of Inductor in this PyTorch version are different.
"""


def _on_cpu(node: Any) -> bool:
    device = node.get_device()
    return device is not None and device.type == "cpu"


def _where(nodes: Sequence[Any], in_backward: bool) -> tuple[str, bool]:
    """Path of the innermost module that contains all results of a kernel, relative to the compiled module ('' for that
    module); and whether the kernel of a backward graph only recomputes forward values, by the partitioner's tags.

    If the compiler's metadata has an unexpected form, returns the compiled module: a range must not fail a compilation.
    """
    try:
        results = [node.node for node in nodes if node.node is not None]
        paths = [path for result in results if (path := _path_of(result)) is not None]
        tags = {node.meta.get("partitioner_tag") for result in results for node in _computing(result)}
        return ".".join(_common(paths)), in_backward and tags == {"is_forward"}
    except (AttributeError, IndexError, KeyError, TypeError):
        return "", False


def _computing(result: Any) -> list[Any]:
    """The FX nodes that a result was computed from, except for constants, which modules share."""
    return [node for node in result.get_origins() if node.op == "call_function" and node.all_input_nodes]


def _path_of(result: Any) -> list[str] | None:
    """Path of the module that a result belongs to, as a list of names; None if unknown.

    A node without a module is an operator of the compiled module itself. In the backward graph it is a sum of
    gradients, which autograd adds on its own. In that case, and if the result has no node of its own, the nodes that it
    was computed from decide, except for constants (the compiler shares them among modules), views and, in the backward
    graph, recomputed forward nodes.
    """
    node = getattr(result, "origin_node", None)
    if node is not None and (path := _path(node)) is not None:
        return path
    computing = _computing(result)
    backward = [node for node in computing if node.meta.get("partitioner_tag") in _BACKWARD]
    computing = backward or computing
    not_views = [
        node
        for node in computing
        if not getattr(node.target, "is_view", False) and "_unsafe_view" not in str(node.target)
    ]
    paths = [_path(node) for node in not_views or computing]
    module_paths = [path for path in paths if path is not None] if backward else [path or [] for path in paths]
    return _common(module_paths) if module_paths else None


def _common(paths: list[list[str]]) -> list[str]:
    """The common prefix of the paths."""
    if not paths:
        return []
    first, last = min(paths), max(paths)
    parting = (index for index, (name, other) in enumerate(zip(first, last, strict=False)) if name != other)
    return first[: next(parting, len(first))]


def _path(node: Any) -> list[str] | None:
    """Path of the module that a node comes from, as a list of names; None if the graph has no module stack for it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    source = str(list(stack.values())[-1][0])
    root = _ROOT.match(source)
    if root is None:
        return []  # from a module outside the compiled one
    path = _PART.sub(lambda found: f".{found[1] or found[2]}", source[root.end() :])
    return [name for name in strip_wrappers(path).split(".") if name]
