"""Keeps hooks out of torch.compile traces.

A traced hook adds nothing to the graph except guards. These guards would compile every layer separately, and recompile
all layers when the hooks are removed. So the hooks are removed while the compiler traces, and installed again
afterwards: compiled code does not check for hooks, and code that runs in Python calls them. Dynamo would also compile
the hooks themselves, to empty graphs, so they are marked as skipped.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from nvprof_kit._instrument.patches import Shared
from nvprof_kit._instrument.torch_compat import skip_compiling_ranges


class Pausable(Protocol):
    """An object with hooks on modules that can be removed temporarily."""

    def pause(self) -> bool:
        """Remove the hooks; returns whether there were any."""

    def resume(self) -> None:
        """Install the hooks again, if ranges are still emitted."""


_watched: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""The owners of hooks, in installation order; their hooks are reinstalled in this order."""
_paused: list[Pausable] = []


class Kept:
    """Keeps hooks out of traces until `remove` is called or the owner of the hooks is garbage-collected."""

    def __init__(self, annotation: Pausable) -> None:
        self._annotation = weakref.ref(annotation)
        _watched.setdefault(annotation, None)
        self._hold = _callbacks.hold(annotation)

    def remove(self) -> None:
        """Stop removing the hooks while the compiler traces."""
        annotation = self._annotation()
        if annotation is not None and _watched is not None:  # None while Python ends
            _watched.pop(annotation, None)
            if annotation in _paused:
                _paused.remove(annotation)
        self._hold.remove()


def pause_while_tracing(annotation: Pausable) -> Kept:
    """Remove the hooks whenever torch.compile traces, until the returned handle is removed.

    Every optimizer imports the compiler, so most programs have loaded it already.

    Args:
        annotation: The owner of the hooks; held weakly.
    """
    return Kept(annotation)


def _install() -> None:
    import torch._dynamo as dynamo

    if _begin not in dynamo.callback_handler.start_callbacks:  # `torch._dynamo.reset` clears the callbacks
        dynamo.on_compile_start(_begin)
        dynamo.on_compile_end(_end)
        skip_compiling_ranges()


def _undo() -> None:
    import torch._dynamo as dynamo

    handler = dynamo.callback_handler
    for callbacks, callback in ((handler.start_callbacks, _begin), (handler.end_callbacks, _end)):
        if callback in callbacks:
            callbacks.remove(callback)


_callbacks = Shared(_install, _undo)


def _begin(*arguments: Any) -> None:
    if arguments and getattr(getattr(arguments[0], "callback_trigger", None), "name", "DYNAMO") != "DYNAMO":
        return
    _paused.extend(annotation for annotation in list(_watched) if annotation.pause())


def _end(*_arguments: Any) -> None:
    while _paused:
        _paused.pop(0).resume()
