"""Keeps hooks out of the compiler's sight.

A hook that torch.compile traces leaves nothing in the graph but guards, by which every layer would be compiled anew and
all of them once more when the hooks go. So while the compiler traces, the hooks are out. Afterwards they are back: what
it compiled does not look at them, what it left to Python does. There it would compile the hooks themselves, to nothing;
it is told to leave them be.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from nvprof_kit._instrument.compile.uncompiled import leave_ranges_to_python
from nvprof_kit._instrument.patches import Shared


class Pausable(Protocol):
    """What has hooks on modules that can be taken out for a while."""

    def pause(self) -> bool:
        """Take the hooks out; says whether there were any."""

    def resume(self) -> None:
        """Put them back, if ranges are emitted still."""


_watched: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""In the order in which their hooks were installed, which is kept."""
_paused: list[Pausable] = []


class Kept:
    """What keeps hooks out of the compiler's sight; it ends with `remove`, or with what has the hooks."""

    def __init__(self, annotation: Pausable) -> None:
        self._annotation = weakref.ref(annotation)
        _watched.setdefault(annotation, None)
        self._hold = _callbacks.hold(annotation)

    def remove(self) -> None:
        """Leave the hooks where they are while the compiler traces."""
        annotation = self._annotation()
        if annotation is not None:
            _watched.pop(annotation, None)
            if annotation in _paused:
                _paused.remove(annotation)
        self._hold.remove()


def keep_out(annotation: Pausable) -> Kept:
    """Take the hooks out whenever torch.compile traces, until what is returned is removed.

    Every optimizer imports the compiler, so a program that has not loaded it by now is the exception.

    Args:
        annotation: What has the hooks; held weakly.
    """
    return Kept(annotation)


def _install() -> None:
    import torch._dynamo as dynamo

    if _begin not in dynamo.callback_handler.start_callbacks:  # `torch._dynamo.reset` forgets them
        dynamo.on_compile_start(_begin)
        dynamo.on_compile_end(_end)
        leave_ranges_to_python()


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
